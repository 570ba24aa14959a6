// One pass by the high bits of the key cuts the entries into many small chunks of the key range; each chunk is
// then sorted by one thread, in cache.
#include "sort.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace recsys {
namespace {

constexpr int kMaxChunkBits = 14;
constexpr int kEntriesPerChunkBits = 9;  // they fit the first cache, and outweigh a pass's 256 counters
constexpr int64_t kInsertionLimit = 40;
constexpr int64_t kEntriesPerThread = 8192;  // a thread with less work costs more than it saves

int count_bits(uint64_t value) {
    int bits = 0;
    for (; value; value >>= 1) ++bits;
    return bits;
}

void insertion_sort(Entry* entries, int64_t count) {
    for (int64_t i = 1; i < count; ++i) {
        const Entry entry = entries[i];
        int64_t place = i;
        for (; place > 0 && entries[place - 1].key > entry.key; --place) entries[place] = entries[place - 1];
        entries[place] = entry;
    }
}

// Least significant digit first, over the low `bits` of the key.
void radix_sort(Entry* entries, Entry* scratch, int64_t count, int bits) {
    Entry *from = entries, *to = scratch;
    for (int shift = 0; shift < bits; shift += 8) {
        int64_t places[256] = {};
        for (int64_t i = 0; i < count; ++i) ++places[from[i].key >> shift & 255];
        int64_t place = 0;
        for (int64_t& digit : places) place += std::exchange(digit, place);
        for (int64_t i = 0; i < count; ++i) to[places[from[i].key >> shift & 255]++] = from[i];
        std::swap(from, to);
    }
    if (from != entries) std::copy(from, from + count, entries);
}

}  // namespace

void sort_by_key(Buffer<Entry>& entries, uint64_t key_limit, int threads) {
    const int64_t count = entries.size;
    const int key_bits = key_limit > 1 ? count_bits(key_limit - 1) : 0;
    const int wanted = std::clamp(count_bits(count) - kEntriesPerChunkBits, 0, kMaxChunkBits);
    const int chunk_bits = std::min(key_bits, wanted);
    const int shift = key_bits - chunk_bits;
    const int64_t num_chunks = int64_t{1} << chunk_bits;
    const int parts = static_cast<int>(std::clamp<int64_t>(count / kEntriesPerThread, 1, threads));

    // places[part][chunk]: first how many entries, then where the next one goes
    std::vector<int64_t> places(parts * num_chunks);
    std::vector<int64_t> starts(num_chunks + 1);
    Buffer<Entry> sorted(count);
#pragma omp parallel for num_threads(parts) schedule(static, 1)
    for (int part = 0; part < parts; ++part) {
        int64_t* mine = places.data() + part * num_chunks;
        for (int64_t i = count * part / parts; i < count * (part + 1) / parts; ++i) ++mine[entries[i].key >> shift];
    }
    int64_t place = 0;
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
        starts[chunk] = place;
        for (int part = 0; part < parts; ++part) place += std::exchange(places[part * num_chunks + chunk], place);
    }
    starts[num_chunks] = count;
#pragma omp parallel for num_threads(parts) schedule(static, 1)
    for (int part = 0; part < parts; ++part) {
        int64_t* mine = places.data() + part * num_chunks;
        for (int64_t i = count * part / parts; i < count * (part + 1) / parts; ++i)
            sorted[mine[entries[i].key >> shift]++] = entries[i];
    }
#pragma omp parallel for num_threads(parts) schedule(dynamic, 4)
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
        const int64_t start = starts[chunk], size = starts[chunk + 1] - start;
        if (size <= kInsertionLimit)
            insertion_sort(sorted.data() + start, size);
        else
            radix_sort(sorted.data() + start, entries.data() + start, size, shift);
    }
    entries = std::move(sorted);
}

Groups group_by_key(const Buffer<Entry>& sorted, int threads) {
    const int64_t count = sorted.size;
    const int parts = static_cast<int>(std::clamp<int64_t>(count / kEntriesPerThread, 1, threads));
    const auto begins_group = [&](int64_t i) { return i == 0 || sorted[i].key != sorted[i - 1].key; };
    std::vector<int64_t> before(parts + 1);
#pragma omp parallel for num_threads(parts) schedule(static, 1)
    for (int part = 0; part < parts; ++part) {
        int64_t found = 0;
        for (int64_t i = count * part / parts; i < count * (part + 1) / parts; ++i) found += begins_group(i);
        before[part + 1] = found;
    }
    for (int part = 0; part < parts; ++part) before[part + 1] += before[part];
    Groups groups{Buffer<int64_t>(before[parts] + 1), before[parts]};
#pragma omp parallel for num_threads(parts) schedule(static, 1)
    for (int part = 0; part < parts; ++part) {
        int64_t next = before[part];
        for (int64_t i = count * part / parts; next < before[part + 1]; ++i) {
            groups.starts[next] = i;  // until the next one, should i begin none: no branch that is hard to foresee
            next += begins_group(i);
        }
    }
    groups.starts[groups.count] = count;
    return groups;
}

}  // namespace recsys
