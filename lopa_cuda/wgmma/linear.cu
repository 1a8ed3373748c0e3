// x [T, K] @ w [C, K].T for 65 tokens and more: up to 320 of them every weight is read from memory once. A tile has all
// tokens, or TOKENS of them: tiles of the same weights run next to each other, and meet them in L2.
//
// Tokens are the matrix unit's first dimension, 64 or 128 a warpgroup; weight rows are its second, ROWS of them, so that
// tiles divide evenly over the multiprocessors. Of a cluster, SHARE programs take neighbouring tiles, and each fetches
// its part of the activations for all of them; SPLITS programs take parts of the depth of one tile, and add their sums
// in shared memory. Without splits programs stay for several tiles, and the next one's weights come while one ends.
//
//   last warp(s):    wait for a free stage -> weights for this program, a part of the tokens for those that share them
//   each other one:  wait for a full stage -> products of its tokens -> free the stage -> sum over splits -> store
//
// Constants given by linear.py: WARPGROUPS, TILES (64 tokens each, of a warpgroup), ROWS (of gate and of up together
// where IS_GATED), SPLITS, SHARE, STAGES, CHUNK (weight rows of one instruction), UNIT_BLOCKS (see move_sums), IS_GIVING
// and FETCHING_REGISTERS (see below), IS_CUT (tiles of some tokens), IS_FLOAT8, IS_INT8, IS_GATED; and before this text
// the function `multiply` for CHUNK rows. A stage holds BLOCK_BYTES of every row in the 128-byte swizzle.

constexpr int STEP_BYTES = 32;  // of a row in one instruction
constexpr int TOKENS = 64 * WARPGROUPS * TILES;
constexpr int MULTIPLYING = 128 * WARPGROUPS;  // threads
constexpr int THREADS = MULTIPLYING + (IS_GIVING ? 128 : 32);
constexpr int CLUSTER = SHARE * SPLITS;
// A whole warpgroup fetches where it has to give registers to the others; else one warp does, and leaves room for the
// kernel after this one to be there early.
constexpr int ALL_REGISTERS = 65536 / THREADS / 8 * 8 * THREADS;
constexpr int MOST_REGISTERS = (ALL_REGISTERS - 128 * FETCHING_REGISTERS) / MULTIPLYING / 8 * 8;
constexpr int REGISTERS = MOST_REGISTERS < 240 ? MOST_REGISTERS : 240;
constexpr int X_BYTES = TOKENS * BLOCK_BYTES;
constexpr int STAGE_BYTES = X_BYTES + ROWS * BLOCK_BYTES;
constexpr int ELEMENTS = IS_FLOAT8 || IS_INT8 ? BLOCK_BYTES : BLOCK_BYTES / 2;  // of a block
constexpr int CHUNKS = ROWS / CHUNK, PARTS = TILES * CHUNKS;  // of a warpgroup: each one instruction a step
constexpr int COLUMNS = IS_GATED ? ROWS / 2 : ROWS;  // of the output in a tile
constexpr int X_PART = TOKENS / SHARE;
static_assert(ROWS % CHUNK == 0 && CHUNK % 8 == 0 && X_PART % 8 == 0 && X_PART <= 256 && ROWS <= 256, "tile");

struct __align__(64) TensorMap {
    unsigned char bytes[128];
};

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
    return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// ---- barriers in shared memory -------------------------------------------------------------------------------------

__device__ __forceinline__ void init_barrier(uint32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void expect_bytes(uint32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_barrier(uint32 barrier, int phase) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\nbra again;\nover:\n}\n" ::"r"(barrier), "r"(phase) : "memory");
}

// Orders nothing but the barrier itself: what was read was read by the matrix unit, and is over. Release at the scope of
// the cluster would wait for memory, once a stage, and take twice the time.
__device__ __forceinline__ void arrive_at(uint32 barrier, uint32 program) {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(barrier), "r"(program) : "memory");
}

__device__ __forceinline__ void meet_cluster() {
    if constexpr (CLUSTER > 1) {
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    } else {
        __syncthreads();
    }
}

__device__ __forceinline__ uint32 address_in(uint32 address, uint32 program) {
    uint32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(program));
    return remote;
}

__device__ __forceinline__ uint32 cluster_rank() {
    uint32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// ---- the tensor memory accelerator ---------------------------------------------------------------------------------

__device__ __forceinline__ uint64 evict_first() {
    uint64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ uint64 evict_last() {
    uint64 policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void fetch(
    uint32 to, const TensorMap& map, int column, int row, uint32 barrier, uint64 policy
) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(policy) : "memory");
}

__device__ __forceinline__ void fetch_for_cluster(
    uint32 to, const TensorMap& map, int column, int row, uint32 barrier, uint64 policy, int programs
) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(static_cast<unsigned short>(programs)),
        "l"(policy) : "memory");
}

// ---- the matrix unit -----------------------------------------------------------------------------------------------

// Rows of BLOCK_BYTES in the 128-byte swizzle: groups of eight rows lie 1024 bytes apart.
__device__ __forceinline__ uint64 describe(uint32 address) {
    return (1ull << 62) | (64ull << 32) | (1ull << 16) | static_cast<uint64>((address & 0x3ffff) >> 4);
}

__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void end_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void multiply_block(Sum (&sum)[CHUNK / 2], uint64 x, uint64 w, int is_adding) {
    begin_products();
#pragma unroll
    for (int step = 0; step < BLOCK_BYTES / STEP_BYTES; ++step) {
        multiply(sum, x + step * (STEP_BYTES / 16), w + step * (STEP_BYTES / 16), is_adding | (step > 0));
    }
}

__device__ __forceinline__ void hold(float& x) { asm volatile("" : "+f"(x)::"memory"); }
__device__ __forceinline__ void hold(int& x) { asm volatile("" : "+r"(x)::"memory"); }

using Sums = Sum[TILES][CHUNKS][CHUNK / 2];  // of a thread

// Keeps the compiler from moving what reads these sums in front of the wait for them.
__device__ __forceinline__ void settle(Sums& sum) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
        for (int i = 0; i < CHUNK / 2; ++i) {
            hold(sum[part / CHUNKS][part % CHUNKS][i]);
        }
    }
}

// The unit adds float8 products in about 14 bits, so sums leave it every UNIT_BLOCKS blocks; 0: once, at the end.
__device__ __forceinline__ void move_sums(Sums& sum, const Sums& in_unit) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
        for (int i = 0; i < CHUNK / 2; ++i) {
            Sum& to = sum[part / CHUNKS][part % CHUNKS][i];
            const Sum added = in_unit[part / CHUNKS][part % CHUNKS][i];
            to = UNIT_BLOCKS > 0 ? to + added : added;
        }
    }
}

// ---- a tile's end --------------------------------------------------------------------------------------------------
//
// A thread has of every eight columns two neighbours, of two tokens that are eight apart: a *unit* is two neighbours, of
// gate and of up where there are both. Units count over tiles, then the two tokens, then eights of columns.

constexpr int EIGHTS = COLUMNS / 8;
constexpr int UNITS = TILES * 2 * EIGHTS;
constexpr int UNITS_OF_SPLIT = (UNITS + SPLITS - 1) / SPLITS;

struct __align__(8) Unit {
    Sum first, second;
};

static_assert(
    SPLITS == 1 || SPLITS * UNITS_OF_SPLIT * (IS_GATED ? 2 : 1) * MULTIPLYING * sizeof(Unit) <= STAGES * STAGE_BYTES,
    "the stages' memory holds all splits' sums"
);

// Of a thread's sums; `half` is 1 for up.
__device__ __forceinline__ Unit unit_of(const Sums& sum, int unit, int half) {
    const int eight = unit % EIGHTS + half * EIGHTS, of_chunk = CHUNK / 8;
    const Sum* four = &sum[unit / (2 * EIGHTS)][eight / of_chunk][4 * (eight % of_chunk) + 2 * (unit / EIGHTS % 2)];
    return Unit{four[0], four[1]};
}

__device__ __forceinline__ uint32 pack_bf16(float low, float high) {
    uint32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ float from_bf16(uint32 bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ float silu_times(float gate, float up) {
    return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

struct Output {
    unsigned short* out;  // [T, num_columns] bf16
    const float* weight_scale;  // [C]; used in 8 bits
    const float* x_scale;  // [T], or null where the weight's scale has it
    const void* bias;  // [C] or null; int32 is added to the integer sum, bf16 after the scales
    int bias_is_int, num_tokens, num_columns;

    // As kernels.launch.dequantize. column: of the weight's rows; a multiple of two.
    __device__ __forceinline__ float2 scaled(Unit unit, int column, float token_scale, bool has_bias) const {
        if (IS_INT8 && has_bias && bias_is_int) {
            unit.first += static_cast<const int*>(bias)[column];
            unit.second += static_cast<const int*>(bias)[column + 1];
        }
        float2 y = make_float2(static_cast<float>(unit.first), static_cast<float>(unit.second));
        if constexpr (IS_FLOAT8 || IS_INT8) {
            const float2 scale = __ldg(reinterpret_cast<const float2*>(weight_scale + column));
            y.x = y.x * scale.x * token_scale;
            y.y = y.y * scale.y * token_scale;
        }
        if (has_bias && !bias_is_int) {
            const uint32 two = __ldg(reinterpret_cast<const uint32*>(static_cast<const unsigned short*>(bias) + column));
            y.x += from_bf16(two & 0xffff);
            y.y += from_bf16(two >> 16);
        }
        return y;
    }

    // Two columns of a token, which lie inside the output.
    __device__ __forceinline__ uint32 finished(Unit gate, Unit up, int column, float token_scale) const {
        const float2 y = scaled(gate, column, token_scale, !IS_GATED && bias);
        uint32 packed = pack_bf16(y.x, y.y);
        if constexpr (IS_GATED) {
            const float2 z = scaled(up, num_columns + column, token_scale, false);
            const uint32 packed_up = pack_bf16(z.x, z.y);
            packed = pack_bf16(
                silu_times(from_bf16(packed & 0xffff), from_bf16(packed_up & 0xffff)),
                silu_times(from_bf16(packed >> 16), from_bf16(packed_up >> 16))
            );
        }
        return packed;
    }

    __device__ __forceinline__ int inside(int column) const { return min(column, num_columns - 2); }
};

// Of four threads that have the same rows: thread q gets everybody's q-th value.
__device__ __forceinline__ void transpose_quad(uint32 (&value)[4]) {
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
        const bool is_upper = threadIdx.x & distance;
#pragma unroll
        for (int low = 0; low < 4; ++low) {
            if (low & distance) continue;
            const int high = low + distance;
            const uint32 sent = is_upper ? value[low] : value[high];
            const uint32 received = __shfl_xor_sync(0xffffffff, sent, distance);
            (is_upper ? value[low] : value[high]) = received;
        }
    }
}

__device__ __forceinline__ int token_of(int unit) {
    const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    return 64 * (warpgroup * TILES + unit / (2 * EIGHTS)) + 16 * warp + 8 * (unit / EIGHTS % 2) + lane / 4;
}

// Of a thread's tokens, read at once: stores in between would keep the compiler from that.
struct TokenScales {
    float of_row[2 * TILES];

    __device__ __forceinline__ explicit TokenScales(const Output& output) {
#pragma unroll
        for (int row = 0; row < 2 * TILES; ++row) {
            const int token = token_of(row * EIGHTS);
            const bool is_scaled = (IS_FLOAT8 || IS_INT8) && output.x_scale && token < output.num_tokens;
            of_row[row] = is_scaled ? output.x_scale[token] : 1.0f;
        }
    }

    __device__ __forceinline__ float of(int row) const {  // without indexing registers by what is not a constant
        float scale = of_row[0];
#pragma unroll
        for (int other = 1; other < 2 * TILES; ++other) scale = row == other ? of_row[other] : scale;
        return scale;
    }
};

// From registers, 16 bytes a thread and store.
__device__ __forceinline__ void store_sums(
    const Sums& sum, const Output& output, int column0
) {
    const int quarter = threadIdx.x % 4;
    const TokenScales scales(output);
#pragma unroll
    for (int row = 0; row < 2 * TILES; ++row) {
        const int token = token_of(row * EIGHTS);
        unsigned short* const to = output.out + static_cast<size_t>(token) * output.num_columns;
#pragma unroll
        for (int eight = 0; eight < EIGHTS; eight += 4) {
            uint32 value[4] = {};
#pragma unroll
            for (int i = 0; i < 4 && eight + i < EIGHTS; ++i) {
                const int unit = row * EIGHTS + eight + i;
                const int column = output.inside(column0 + 8 * (eight + i) + 2 * quarter);
                value[i] = output.finished(
                    unit_of(sum, unit, 0), unit_of(sum, unit, IS_GATED), column, scales.of_row[row]
                );
            }
            transpose_quad(value);
            const int column = column0 + 8 * (eight + quarter);
            if (token < output.num_tokens && eight + quarter < EIGHTS && column < output.num_columns) {
                *reinterpret_cast<uint4*>(to + column) = make_uint4(value[0], value[1], value[2], value[3]);
            }
        }
    }
}

// Every split's program gets an equal part of a thread's units from all of them, adds them in their order, and stores.
// [split][unit of the part][gate, up][thread] in the memory of the stages, which nobody uses any more.
__device__ __forceinline__ uint32 exchanged(uint32 memory, int split, int unit, int half) {
    const int place = (split * UNITS_OF_SPLIT + unit) * (IS_GATED ? 2 : 1) + half;
    return memory + (place * MULTIPLYING + threadIdx.x) * static_cast<int>(sizeof(Unit));
}

__device__ __forceinline__ void send(uint32 to, float first, float second) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(first), "f"(second) : "memory");
}

__device__ __forceinline__ void send(uint32 to, int first, int second) {
    asm volatile("st.shared::cluster.v2.s32 [%0], {%1, %2};" ::"r"(to), "r"(first), "r"(second) : "memory");
}

__device__ __forceinline__ void send_sums(
    const Sums& sum, uint32 memory, uint32 share, uint32 split
) {
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
        const uint32 owner = share + SHARE * (unit / UNITS_OF_SPLIT);
#pragma unroll
        for (int half = 0; half < (IS_GATED ? 2 : 1); ++half) {
            const Unit sent = unit_of(sum, unit, half);
            send(address_in(exchanged(memory, split, unit % UNITS_OF_SPLIT, half), owner), sent.first, sent.second);
        }
    }
}

__device__ __forceinline__ void store_exchanged(uint32 memory, const Output& output, uint32 split, int column0) {
    const TokenScales scales(output);
#pragma unroll
    for (int i = 0; i < UNITS_OF_SPLIT; ++i) {
        const int unit = split * UNITS_OF_SPLIT + i;
        if (unit >= UNITS) break;
        Unit total[2] = {};
#pragma unroll
        for (int half = 0; half < (IS_GATED ? 2 : 1); ++half) {
#pragma unroll
            for (int from = 0; from < SPLITS; ++from) {
                Unit part;
                asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                             : "=r"(reinterpret_cast<uint32&>(part.first)), "=r"(reinterpret_cast<uint32&>(part.second))
                             : "r"(exchanged(memory, from, i, half)) : "memory");
                total[half].first += part.first;
                total[half].second += part.second;
            }
        }
        const int token = token_of(unit), column = column0 + 8 * (unit % EIGHTS) + 2 * (threadIdx.x % 4);
        const uint32 value =
            output.finished(total[0], total[1], output.inside(column), scales.of(unit / EIGHTS));
        if (token < output.num_tokens && column < output.num_columns) {
            *reinterpret_cast<uint32*>(output.out + static_cast<size_t>(token) * output.num_columns + column) = value;
        }
    }
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

struct Place {  // in the ring of stages
    int stage = 0, phase = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// num_blocks: of the whole depth. Groups are of SHARE neighbouring tiles of some tokens; without splits a cluster takes
// several.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) wide_linear(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map, unsigned short* out,
    const float* weight_scale, const float* x_scale, const void* bias, int bias_is_int, int num_tokens,
    int num_columns, int num_blocks
) {
    extern __shared__ unsigned char shared[];
    const uint32 stages = (shared_address(shared) + 1023) & ~1023u;
    const uint32 full = stages + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
    const uint32 rank = CLUSTER > 1 ? cluster_rank() : 0, share = rank % SHARE, split = rank / SHARE;
    const bool is_fetching = threadIdx.x >= MULTIPLYING;
    const int num_parts = IS_CUT ? (num_tokens + TOKENS - 1) / TOKENS : 1;
    const int num_groups = num_parts * (((num_columns + COLUMNS - 1) / COLUMNS + SHARE - 1) / SHARE);
    const int first_group = blockIdx.x / CLUSTER, num_clusters = gridDim.x / CLUSTER;
    const int first = split * num_blocks / SPLITS, last = (split + 1) * num_blocks / SPLITS;

    auto column_of = [&](int group) { return (group / num_parts * SHARE + static_cast<int>(share)) * COLUMNS; };
    auto first_token_of = [&](int group) { return IS_CUT ? group % num_parts * TOKENS : 0; };
    auto fetch_weights = [&](int group, int block, const Place& place) {
        const uint32 barrier = full + 8 * place.stage, to = stages + place.stage * STAGE_BYTES + X_BYTES;
        const uint64 policy = evict_first();
        expect_bytes(barrier, STAGE_BYTES);
        fetch(to, weight_map, block * ELEMENTS, column_of(group), barrier, policy);
        if constexpr (IS_GATED) {
            const int row = num_columns + column_of(group);
            fetch(to + COLUMNS * BLOCK_BYTES, weight_map, block * ELEMENTS, row, barrier, policy);
        }
    };
    auto fetch_tokens = [&](int group, int block, const Place& place) {
        const uint32 barrier = full + 8 * place.stage, to = stages + place.stage * STAGE_BYTES;
        const int token = first_token_of(group);
        if constexpr (SHARE > 1) {
            const int row = share * X_PART, programs = ((1 << SHARE) - 1) << (SHARE * split);
            fetch_for_cluster(
                to + row * BLOCK_BYTES, x_map, block * ELEMENTS, token + row, barrier, evict_last(), programs
            );
        } else {
            fetch(to, x_map, block * ELEMENTS, token, barrier, evict_last());
        }
    };

    const int num_ahead = min(STAGES, last - first);  // weights on their way before the predecessor has ended
    if (threadIdx.x == MULTIPLYING) {
        for (int stage = 0; stage < STAGES; ++stage) {
            init_barrier(full + 8 * stage, 1);
            init_barrier(empty + 8 * stage, 4 * WARPGROUPS * SHARE);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        Place place;
        for (int block = first; block < first + num_ahead; ++block, place.advance()) {
            fetch_weights(first_group, block, place);
        }
    }
    __syncwarp();
    meet_cluster();

    if (is_fetching) {
        if constexpr (IS_GIVING) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FETCHING_REGISTERS));
        if (threadIdx.x == MULTIPLYING) {
            asm volatile("griddepcontrol.wait;" ::: "memory");
            Place place;
            for (int group = first_group; group < num_groups; group += num_clusters) {
                for (int block = first; block < last; ++block, place.advance()) {
                    if (group > first_group || block >= first + num_ahead) {
                        wait_barrier(empty + 8 * place.stage, place.phase ^ 1);
                        fetch_weights(group, block, place);
                    }
                    fetch_tokens(group, block, place);
                }
            }
            asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
        }
        __syncwarp();
        if constexpr (SPLITS > 1) {
            meet_cluster();
            meet_cluster();
        }
    } else {
        if constexpr (IS_GIVING) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
        Place place;
        auto release = [&](int stage) {  // to those that send to it
            const uint32 lane = threadIdx.x % 32;
            if (lane < SHARE) arrive_at(empty + 8 * stage, SHARE * split + lane);
        };
        for (int group = first_group; group < num_groups; group += num_clusters) {
            Sums sum = {};
            auto multiply_next = [&](Sums& to, int is_adding) {
                wait_barrier(full + 8 * place.stage, place.phase);
                const uint32 at = stages + place.stage * STAGE_BYTES;
                const uint64 x = describe(at + threadIdx.x / 128 * TILES * 64 * BLOCK_BYTES), w = describe(at + X_BYTES);
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    constexpr int ROW = BLOCK_BYTES / 16;  // in a description
                    multiply_block(
                        to[part / CHUNKS][part % CHUNKS], x + part / CHUNKS * 64 * ROW, w + part % CHUNKS * CHUNK * ROW,
                        is_adding
                    );
                }
                end_products();
                wait_products<1>();
            };
            if constexpr (IS_FLOAT8) {
                Sums in_unit = {};
                for (int block = first; block < last;) {
                    const int begin = block, until = UNIT_BLOCKS > 0 ? min(last, block + UNIT_BLOCKS) : last;
                    int previous = 0;
                    for (; block < until; ++block, place.advance()) {
                        multiply_next(in_unit, block > begin);
                        if (block > begin) release(previous);
                        previous = place.stage;
                    }
                    wait_products<0>();
                    settle(in_unit);
                    release(previous);
                    move_sums(sum, in_unit);
                }
            } else {
                int previous = -1;
                for (int block = first; block < last; ++block) {
                    multiply_next(sum, block > first);
                    if (previous >= 0) release(previous);
                    previous = place.stage;
                    place.advance();
                }
                wait_products<0>();
                settle(sum);
                release(previous);
            }
            asm volatile("griddepcontrol.wait;" ::: "memory");
            const int token = first_token_of(group);
            const Output output{
                out + static_cast<size_t>(token) * num_columns, weight_scale, x_scale ? x_scale + token : nullptr, bias,
                bias_is_int, num_tokens - token, num_columns
            };
            if constexpr (SPLITS > 1) {
                meet_cluster();  // all have multiplied: stages are free for sums
                send_sums(sum, stages, share, split);
                meet_cluster();
                store_exchanged(stages, output, split, column_of(group));
            } else {
                store_sums(sum, output, column_of(group));
            }
        }
    }
    if constexpr (SHARE > 1 && SPLITS == 1) meet_cluster();  // nobody leaves while another still sends to it
}
