// Rows come in ascending order, so what depends on the partition alone is computed once a partition.
#include "buckets.h"

#include <algorithm>
#include <cmath>

#include "hash.h"

namespace recsys {
namespace {

constexpr uint64_t kLow62 = (uint64_t{1} << 62) - 1;
constexpr uint64_t kLow63 = (uint64_t{1} << 63) - 1;
constexpr int64_t kPlaces = 64;  // hashed together

// Division of numbers below 2^63 by a fixed divisor, by multiplication: Granlund and Montgomery, "Division by
// Invariant Integers using Multiplication", PLDI 1994. magic = floor(2^(63 + l) / d) + 1, l = ceil(log2 d),
// exceeds the quotient by e <= 1, and n e / 2^(63 + l) < 2^-l <= 1 / d: too little to change the result.
class Divisor {
public:
    explicit Divisor(uint64_t divisor = 1) : divisor_(divisor) {
        int bits = 0;
        while ((uint64_t{1} << bits) < divisor) ++bits;
        shift_ = bits - 1;
        if (divisor > 1) magic_ = static_cast<uint64_t>((Wide{1} << (63 + bits)) / divisor) + 1;
    }
    uint64_t quotient(uint64_t number) const {
        if (divisor_ == 1) return number;
        return static_cast<uint64_t>(Wide{number} * magic_ >> 64) >> shift_;
    }
    uint64_t remainder(uint64_t number) const { return number - quotient(number) * divisor_; }

private:
    using Wide = unsigned __int128;
    uint64_t divisor_, magic_ = 0;
    int shift_ = 0;
};

// One partition of the map, and the hash within it.
struct Partition {
    int64_t row_start, num_private, bucket_start, private_start;
    uint64_t shared, keys[4], sign_seed;
    Divisor left, right, shared_buckets;
    Hash hash;

    Partition(const BucketMap& map, int64_t index)
        : row_start(map.row_start[index]),
          num_private(map.private_rows[index]),
          bucket_start(map.bucket_start[index]),
          private_start(map.private_start[index]),
          shared(map.shared[index]),
          sign_seed(map.sign_seeds ? map.sign_seeds[index] : 0),
          shared_buckets(map.shared_buckets[index]),
          hash(map.hash) {
        const int num_keys = hash == Hash::balanced ? 4 : hash == Hash::twice ? 2 : hash == Hash::murmur3 ? 1 : 0;
        for (int use = 0; use < num_keys; ++use) keys[use] = map.keys[use * map.num_partitions + index];
        if (hash == Hash::balanced) {
            const auto left_size = static_cast<uint64_t>(std::ceil(std::sqrt(static_cast<double>(shared))));
            left = Divisor(left_size);
            right = Divisor((shared + left_size - 1) / left_size);
            left_size_ = left_size;
        }
    }

    // f(x) of buckets.py in place of each x; number 1 is the second function of hash=double.
    void shared_buckets_of(uint64_t* places, int64_t count, int number) const {
        if (hash == Hash::balanced) permute(places, count);
        for (int64_t i = 0; i < count; ++i) {
            const bool mixes = hash == Hash::murmur3 || hash == Hash::twice;
            places[i] = shared_buckets.remainder(mixes ? mix64(places[i] ^ keys[number]) & kLow63 : places[i]);
        }
    }

private:
    void permute(uint64_t* places, int64_t count) const {
        feistel(places, count);
        for (int64_t i = 0; i < count; ++i)
            while (places[i] >= shared) feistel(places + i, 1);
    }

    // Round by round over many places, not place by place: their chains of multiplications overlap.
    void feistel(uint64_t* places, int64_t count) const {
        uint64_t high[kPlaces], low[kPlaces];
        for (int64_t i = 0; i < count; ++i) {
            high[i] = left.quotient(places[i]);
            low[i] = places[i] - high[i] * left_size_;
        }
        for (int round = 0; round < 4; round += 2) {
            for (int64_t i = 0; i < count; ++i)
                low[i] = left.remainder(low[i] + (mix64(high[i] ^ keys[round]) & kLow62));
            for (int64_t i = 0; i < count; ++i)
                high[i] = right.remainder(high[i] + (mix64(low[i] ^ keys[round + 1]) & kLow62));
        }
        for (int64_t i = 0; i < count; ++i) places[i] = high[i] * left_size_ + low[i];
    }

    uint64_t left_size_ = 1;
};

// Buckets of `count` <= kPlaces rows of one partition.
void set_buckets(const Partition& partition, const int64_t* rows, int64_t count, bool is_signed, RowBucket* result) {
    int64_t i = 0;  // private rows come first
    for (; i < count && rows[i] - partition.row_start < partition.num_private; ++i) {
        const int64_t place = rows[i] - partition.row_start, bucket = partition.bucket_start + place;
        result[i] = {bucket, bucket, partition.private_start + place, 1.0f};
    }
    const int64_t start = partition.bucket_start + partition.num_private, num_shared = count - i;
    const bool twice = partition.hash == Hash::twice;
    uint64_t places[kPlaces], first[kPlaces], second[kPlaces];
    for (int64_t j = 0; j < num_shared; ++j)
        places[j] = first[j] = second[j] = rows[i + j] - partition.row_start - partition.num_private;
    partition.shared_buckets_of(first, num_shared, 0);
    if (twice) partition.shared_buckets_of(second, num_shared, 1);
    for (int64_t j = 0; j < num_shared; ++j) {
        const auto one = static_cast<int64_t>(first[j]), other = static_cast<int64_t>(twice ? second[j] : first[j]);
        const float sign = is_signed && (mix64(places[j] ^ partition.sign_seed) & 1) == 0 ? -1.0f : 1.0f;
        result[i + j] = {start + one, start + other, -1, sign};
    }
}

}  // namespace

Buffer<RowBucket> buckets_of(const BucketMap& map, const int64_t* rows, int64_t num_rows, int threads) {
    constexpr int64_t kBlock = 2048;  // rows
    Buffer<RowBucket> result(num_rows);
    const int64_t* last = map.row_start + map.num_partitions;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t begin = 0; begin < num_rows; begin += kBlock) {
        const int64_t end = std::min(begin + kBlock, num_rows);
        for (int64_t u = begin; u < end;) {
            const int64_t* next = std::upper_bound(map.row_start, last, rows[u]);
            const Partition partition(map, next - map.row_start - 1);
            const int64_t limit = next == last ? INT64_MAX : *next;
            while (u < end && rows[u] < limit) {
                const int64_t most = std::min(u + kPlaces, end);
                const int64_t count = std::lower_bound(rows + u, rows + most, limit) - (rows + u);
                set_buckets(partition, rows + u, count, map.sign_seeds, result.data() + u);
                u += count;
            }
        }
    }
    return result;
}

Buffer<SketchRow> sketch_of(const SketchMap& map, const int64_t* rows, const Runs& runs, int threads) {
    Buffer<SketchRow> result(runs.starts[runs.count]);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 16)
    for (int64_t run = 0; run < runs.count; ++run) {
        const int64_t partition = runs.partitions[run], width = map.width[partition];
        const Divisor by_width(width);
        for (int64_t u = runs.starts[run]; u < runs.starts[run + 1]; ++u) {
            const auto place = static_cast<uint64_t>(rows[u] - map.row_start[partition]);
            for (int block = 0; block < kSketchDepth; ++block) {
                const uint64_t mixed = mix64(place ^ map.seeds[block * map.num_partitions + partition]);
                const auto bucket = static_cast<int64_t>(by_width.remainder(mixed & kLow63));
                result[u].bucket[block] = map.start[partition] + block * width + bucket;
                result[u].sign[block] = mixed >> 63 ? -1.0f : 1.0f;
            }
        }
    }
    return result;
}

}  // namespace recsys
