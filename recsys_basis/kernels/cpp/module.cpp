// The Python module recsys_basis.kernels._kernels, and the choice of instruction set at run time.
#include "module.h"

#include <sys/mman.h>

namespace recsys {

namespace baseline {
extern const Kernels kernels;
}
#ifdef RECSYS_X86
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#endif

namespace {

struct Choice {
    const Kernels* kernels;
    const char* name;
};

Choice choose() {
#ifdef RECSYS_X86
    __builtin_cpu_init();
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
    if (has_avx512) return {&avx512::kernels, "avx512"};
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {&avx2::kernels, "avx2"};
#endif
    return {&baseline::kernels, "baseline"};
}

const Choice choice = choose();

}  // namespace

const Kernels& kernels() { return *choice.kernels; }
const char* instruction_set() { return choice.name; }

void advise_huge_pages(void* start, size_t num_bytes) {
    constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
    constexpr int kCollapse = 25;  // MADV_COLLAPSE of Linux 6.1: pages that were touched before become huge, too
    const uintptr_t first = (reinterpret_cast<uintptr_t>(start) + kHugePage - 1) / kHugePage * kHugePage;
    const uintptr_t last = (reinterpret_cast<uintptr_t>(start) + num_bytes) / kHugePage * kHugePage;
    if (last <= first) return;
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
    madvise(reinterpret_cast<void*>(first), last - first, kCollapse);
}

}  // namespace recsys

NB_MODULE(_kernels, module) {
    module.def("advise_huge_pages", [](const recsys::nb::ndarray<recsys::nb::device::cpu>& tensor) {
        recsys::advise_huge_pages(tensor.data(), tensor.nbytes());
    });
    module.attr("instruction_set") = recsys::instruction_set();
    recsys::bind_bags(module);
    recsys::bind_rules(module);
    recsys::bind_basis(module);
    recsys::bind_dense(module);
    recsys::bind_stored(module);
}
