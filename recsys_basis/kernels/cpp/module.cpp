// The Python module recsys_basis.kernels._kernels, and the choice of instruction set at run time.
#include "module.h"

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

}  // namespace recsys

NB_MODULE(_kernels, module) {
    module.attr("instruction_set") = recsys::instruction_set();
    recsys::bind_bags(module);
    recsys::bind_rules(module);
}
