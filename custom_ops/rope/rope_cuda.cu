// RoPE on CUDA.
//
// A work item is N pairs of one head, N elements being a 16-byte vector: two loads, two stores. A
// thread takes U heads and reads the tables of its N pairs once for them; all loads are on their
// way before the first is used. The heads of q, k and v count as one list, so one launch serves
// all. Blocks that share a table row may run far apart in time, so that tables, small as they are,
// would be read from memory again: they are kept in L2 before what only passes through.
#include "custom_ops/common/cuda_async.cuh"
#include "custom_ops/common/cuda_launch.cuh"
#include "custom_ops/common/cuda_vector.cuh"
#include "custom_ops/common/dispatch.h"
#include "custom_ops/rope/rope.h"

namespace paddle_fused {
namespace gpu {

#include "custom_ops/rope/rope_math.h"

namespace {

// Where the 2 N elements of an item lie, and which of them are pairs.
//   kInterleaved  N at j, N at j + half (one pair at a time: 2 next to each other); neighbours
//   kHalves       N at j, N at j + half; one from each
//   kToHalves     in: 2 N next to each other, neighbours; out: as kHalves
//   kFromHalves   the reverse
enum class Pattern { kInterleaved, kHalves, kToHalves, kFromHalves };

struct RopePlan {
  int items;            // of a head in one turn
  int turns;            // more than one only where a head has very many items
  int slots;            // heads side by side in a block
  int heads;            // in all tensors
  int head_blocks;      // blocks that share a token
  int64_t table_reads;  // blocks that read a row of the tables
  int64_t tokens;
  int64_t tasks;  // groups of blockDim.y tokens, times head_blocks
};

template <class T, int N>
struct Item {
  Raw<T, N> first, second;
};

// Element offsets of the two vectors of item i.
template <int N, bool kNextToEachOther>
PADDLE_FUSED_INLINE int2 OffsetsOf(int i, int half) {
  return kNextToEachOther ? make_int2(2 * N * i, 2 * N * i + N) : make_int2(N * i, N * i + half);
}

PADDLE_FUSED_INLINE int64_t PositionAt(const void* ids, bool int32, int64_t index) {
  return int32 ? static_cast<const int32_t*>(ids)[index] : static_cast<const int64_t*>(ids)[index];
}

// The table entries of N features: of type TTable, or (void) of any type, widened at once.
template <class A, class TTable, int N>
struct TableVector {
  Raw<TTable, N> raw;
  PADDLE_FUSED_INLINE void Load(const void* table, DType, int64_t at, L2Policy policy) {
    raw = LoadAligned<TTable, N>(static_cast<const TTable*>(table) + at, policy);
  }
  PADDLE_FUSED_INLINE void Widen(A (&v)[N]) const { Unpack(raw, v); }
};
template <class A, int N>
struct TableVector<A, void, N> {
  A values[N];
  PADDLE_FUSED_INLINE void Load(const void* table, DType dtype, int64_t at, L2Policy) {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = LoadAny<A>(table, dtype, at + i);
  }
  PADDLE_FUSED_INLINE void Widen(A (&v)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = values[i];
  }
};

// What a thread works on in one task: the first of its heads of one token.
struct Place {
  int64_t token, batch, position;
  int head;
};
PADDLE_FUSED_INLINE Place PlaceOf(const RopePlan& plan, int64_t seq, int64_t task, int slot,
                                  int heads_per_thread) {
  int64_t token = task;
  int head = slot;
  if (plan.head_blocks > 1) {
    token = Quotient(task, plan.head_blocks, plan.tasks);
    head += static_cast<int>(task - token * plan.head_blocks) * plan.slots * heads_per_thread;
  }
  token = token * blockDim.y + threadIdx.y;
  const int64_t batch = Quotient(token, seq, plan.tokens);
  return {token, batch, token - batch * seq, head};
}

// The rotary part of a head.
template <class T>
struct Head {
  const T* in;
  T* out;
};
template <class T>
PADDLE_FUSED_INLINE Head<T> HeadOf(const RopeParams& p, const Place& place, int head) {
  int which = 0;
  if (p.tensor_count > 1 && head >= p.tensors[0].heads) {
    head -= static_cast<int>(p.tensors[0].heads);
    which = 1;
    if (p.tensor_count > 2 && head >= p.tensors[1].heads) {
      head -= static_cast<int>(p.tensors[1].heads);
      which = 2;
    }
  }
  const RopeTensor& t = p.tensors[which];
  const int64_t at = place.batch * t.batch_stride + place.position * t.seq_stride +
                     head * t.head_stride + p.rotary_begin;
  return {static_cast<const T*>(t.in) + at, static_cast<T*>(t.out) + at};
}

// Before the previous kernel ends: the heads of the first task, each line by one thread.
template <class T, int U>
PADDLE_FUSED_INLINE void PrefetchHeads(const RopeParams& p, const RopePlan& plan, int slot,
                                       int2 in_at) {
  constexpr int kLine = 128;
  if (!InFirstWave() || in_at.x * sizeof(T) % kLine != 0) return;
  const Place place = PlaceOf(plan, p.seq, blockIdx.x, slot, U);
  if (place.token >= plan.tokens) return;
#pragma unroll 1
  for (int u = 0; u < U && place.head + u * plan.slots < plan.heads; ++u) {
    const T* const in = HeadOf<T>(p, place, place.head + u * plan.slots).in;
    Prefetch(in + in_at.x);
    Prefetch(in + in_at.y);
  }
}

template <class T, int N, class TTable, Pattern kPattern, int U>
__global__ void __launch_bounds__(128, U <= 2 ? 6 : 4)
    RopeKernel(const __grid_constant__ RopeParams p, const __grid_constant__ RopePlan plan) {
  using A = Acc<T>;
  // Pairs are neighbours within a vector on the way in, or out.
  constexpr bool kNeighbours = kPattern == Pattern::kInterleaved;
  constexpr bool kInTogether = kPattern == Pattern::kToHalves || (kNeighbours && N == 1);
  constexpr bool kOutTogether = kPattern == Pattern::kFromHalves || (kNeighbours && N == 1);
  const int slot = threadIdx.x / plan.items;
  const int half = static_cast<int>(p.rotary_dim / 2);
  const int turn = plan.turns == 1 ? 0 : static_cast<int>(blockIdx.y);
  const int item = turn * plan.items + threadIdx.x - slot * plan.items;
  if (item * N >= half) return;
  const int2 in_at = OffsetsOf<N, kInTogether>(item, half);
  const int2 out_at = OffsetsOf<N, kOutTogether>(item, half);
  // The tables are laid out as the halves, or as the interleaved pairs.
  const int2 table_at = OffsetsOf < N, kNeighbours && N == 1 > (item, half);

  if constexpr (N > 1) PrefetchHeads<T, U>(p, plan, slot, in_at);
  WaitForPreviousKernel();
  LetNextKernelStart();
  const L2Policy table_policy = plan.table_reads > 2 ? KeptInL2() : NormalInL2();
  for (int64_t task = blockIdx.x; task < plan.tasks; task += gridDim.x) {
    const Place place = PlaceOf(plan, p.seq, task, slot, U);
    if (place.token >= plan.tokens) continue;

    Item<T, N> items[U];
    Head<T> heads[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int head = place.head + u * plan.slots;
      if (head >= plan.heads) break;
      heads[u] = HeadOf<T>(p, place, head);
      items[u].first = LoadAligned<T, N>(heads[u].in + in_at.x);
      items[u].second = LoadAligned<T, N>(heads[u].in + in_at.y);
    }
    int64_t table_row = place.position;
    bool bad = false;
    if (p.position_ids != nullptr) {
      table_row = PositionAt(p.position_ids, p.position_ids_int32, place.token);
      bad = table_row < 0 || table_row >= p.table_rows;
      if (bad) table_row = 0;
    }
    TableVector<A, TTable, N> raw_cos[2], raw_sin[2];
    const int64_t table_begin = place.batch * p.table_batch_stride + table_row * p.rotary_dim;
    raw_cos[0].Load(p.cos, p.table_dtype, table_begin + table_at.x, table_policy);
    raw_cos[1].Load(p.cos, p.table_dtype, table_begin + table_at.y, table_policy);
    raw_sin[0].Load(p.sin, p.table_dtype, table_begin + table_at.x, table_policy);
    raw_sin[1].Load(p.sin, p.table_dtype, table_begin + table_at.y, table_policy);
    A cos[2][N], sin[2][N];
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      raw_cos[v].Widen(cos[v]);
      raw_sin[v].Widen(sin[v]);
    }
    if (bad) {
#pragma unroll
      for (int i = 0; i < 2 * N; ++i) cos[i / N][i % N] = __int_as_float(0x7fc00000);
    }
    // From here on the sines carry the signs: own * cos + partner * sin.
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (kNeighbours && N > 1) {
        if (i % 2 == 0) {
#pragma unroll
          for (int v = 0; v < 2; ++v) {
            const auto sines = RopeSignedSines(sin[v][i], sin[v][i + 1], p.adjoint);
            sin[v][i] = sines.first;
            sin[v][i + 1] = sines.second;
          }
        }
      } else {
        const auto sines = RopeSignedSines(sin[0][i], sin[1][i], p.adjoint);
        sin[0][i] = sines.first;
        sin[1][i] = sines.second;
      }
    }
    {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (place.head + u * plan.slots >= plan.heads) break;
        A x[N], y[N], rx[N], ry[N];
        Unpack(items[u].first, x);
        Unpack(items[u].second, y);
        if constexpr (kPattern == Pattern::kToHalves && N > 1) {
          // Even elements of the 2 N are the first of a pair, odd ones the second.
          A even[N], odd[N];
#pragma unroll
          for (int i = 0; i < N; ++i) {
            even[i] = 2 * i < N ? x[(2 * i) % N] : y[(2 * i) % N];
            odd[i] = 2 * i + 1 < N ? x[(2 * i + 1) % N] : y[(2 * i + 1) % N];
          }
#pragma unroll
          for (int i = 0; i < N; ++i) x[i] = even[i], y[i] = odd[i];
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if constexpr (kNeighbours && N > 1) {
            rx[i] = RopeRotate(x[i], x[i ^ 1], cos[0][i], sin[0][i]);
            ry[i] = RopeRotate(y[i], y[i ^ 1], cos[1][i], sin[1][i]);
          } else {
            rx[i] = RopeRotate(x[i], y[i], cos[0][i], sin[0][i]);
            ry[i] = RopeRotate(y[i], x[i], cos[1][i], sin[1][i]);
          }
        }
        if constexpr (kPattern == Pattern::kFromHalves && N > 1) {
#pragma unroll
          for (int i = 0; i < N; ++i) {
            x[i] = i % 2 == 0 ? rx[i / 2] : ry[i / 2];
            y[i] = i % 2 == 0 ? rx[(i + N) / 2] : ry[(i + N) / 2];
          }
#pragma unroll
          for (int i = 0; i < N; ++i) rx[i] = x[i], ry[i] = y[i];
        }
        StoreAligned(heads[u].out + out_at.x, Pack<T>(rx));
        StoreAligned(heads[u].out + out_at.y, Pack<T>(ry));
        if (p.rotary_dim < p.head_dim) {
          // Features outside the rotary part.
          const int rest = static_cast<int>(p.head_dim - p.rotary_dim);
          const int rotary_begin = static_cast<int>(p.rotary_begin);
          for (int j = item * N; j < rest; j += plan.items * plan.turns * N) {
            const int at = j < rotary_begin ? j - rotary_begin : j + 2 * half - rotary_begin;
            Raw<T, N> kept = LoadAligned<T, N>(heads[u].in + at);
            if (bad) {
#pragma unroll
              for (int i = 0; i < N; ++i) x[i] = __int_as_float(0x7fc00000);
              kept = Pack<T>(x);
            }
            StoreAligned(heads[u].out + at, kept);
          }
        }
      }
    }
  }
}

__global__ void __launch_bounds__(256) RopeTableKernel(const __grid_constant__ RopeTableParams p) {
  WaitForPreviousKernel();
  LetNextKernelStart();
  const int64_t half = p.dim / 2, count = p.rows * half;
  const bool interleaved = p.pairing == RopePairing::kInterleaved;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; index < count;
       index += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t row = index / half, i = index - row * half;
    const double frequency =
        pow(p.base, -2.0 * static_cast<double>(i) / static_cast<double>(p.dim));
    const int64_t position =
        p.position_ids == nullptr ? row : PositionAt(p.position_ids, p.position_ids_int32, row);
    double sine, cosine;
    sincos(static_cast<double>(position) * frequency, &sine, &cosine);
    const int64_t first = row * p.dim + (interleaved ? 2 * i : i);
    const int64_t second = first + (interleaved ? 1 : half);
    p.cos[first] = p.cos[second] = static_cast<float>(cosine);
    p.sin[first] = p.sin[second] = static_cast<float>(sine);
  }
}

Pattern PatternOf(const RopeParams& p) {
  switch (p.pairing) {
    case RopePairing::kInterleaved:
      return Pattern::kInterleaved;
    case RopePairing::kHalves:
      return Pattern::kHalves;
    default:
      return p.adjoint ? Pattern::kFromHalves : Pattern::kToHalves;
  }
}

// Whether every vector of N elements lies on its own boundary.
bool FitsVectors(const RopeParams& p, int64_t n) {
  if ((p.rotary_dim / 2) % n != 0 || p.rotary_begin % n != 0 || p.head_dim % n != 0) return false;
  if (!AlignedTo16({p.cos, p.sin})) return false;
  for (int i = 0; i < p.tensor_count; ++i) {
    const RopeTensor& t = p.tensors[i];
    if (!AlignedTo16({t.in, t.out}) || t.batch_stride % n != 0 || t.seq_stride % n != 0 ||
        t.head_stride % n != 0) {
      return false;
    }
  }
  return true;
}

int AllHeads(const RopeParams& p) {
  int64_t heads = 0;
  for (int i = 0; i < p.tensor_count; ++i) heads += p.tensors[i].heads;
  return static_cast<int>(heads);
}

template <class T, int N, class TTable, Pattern kPattern, int U>
void RunKernel(const RopeParams& p, cudaStream_t stream, int block_threads) {
  RopePlan plan{};
  const int64_t items = p.rotary_dim / 2 / N;
  plan.turns = static_cast<int>(CeilDiv<int64_t>(items, 128));
  plan.items = static_cast<int>(CeilDiv<int64_t>(items, plan.turns));
  plan.heads = AllHeads(p);
  // All heads of a token in one block where they fit, evenly spread over blocks else; several
  // tokens where a block would be small.
  const int wanted = CeilDiv(plan.heads, U);
  const int most = std::max(1, block_threads / plan.items);
  plan.head_blocks = CeilDiv(wanted, most);
  plan.slots = CeilDiv(wanted, plan.head_blocks);
  plan.table_reads = plan.head_blocks * (p.table_batch_stride == 0 ? p.batch : 1);
  plan.tokens = p.batch * p.seq;
  const int threads = plan.slots * plan.items;
  const int block_tokens = std::max(1, block_threads / threads);
  plan.tasks = CeilDiv<int64_t>(plan.tokens, block_tokens) * plan.head_blocks;
  const LaunchShape shape{
      dim3(GridSize(plan.tasks), static_cast<unsigned>(plan.turns)),
      dim3(static_cast<unsigned>(threads), static_cast<unsigned>(block_tokens))};
  Launch("rope", RopeKernel<T, N, TTable, kPattern, U>, shape, stream, p, plan);
}

template <class T, class TTable, Pattern kPattern>
void RunPattern(const RopeParams& p, cudaStream_t stream, const RopeTuning& t) {
  constexpr int N = kVector<T>;
  if constexpr (sizeof(T) == 2 && sizeof(TTable) == 2) {
    if (t.heads == 5) return RunKernel<T, N, TTable, kPattern, 5>(p, stream, t.threads);
  }
  return t.heads == 1   ? RunKernel<T, N, TTable, kPattern, 1>(p, stream, t.threads)
         : t.heads == 2 ? RunKernel<T, N, TTable, kPattern, 2>(p, stream, t.threads)
                        : RunKernel<T, N, TTable, kPattern, 4>(p, stream, t.threads);
}

template <class T, Pattern kPattern>
void RunTable(const RopeParams& p, cudaStream_t stream, const RopeTuning* tuning) {
  const int64_t items = p.rotary_dim / 2 / kVector<T>;
  // Tables of 16 bits leave registers for one more head.
  const bool narrow_tables = sizeof(T) == 2 && p.table_dtype == p.dtype;
  RopeTuning t = items <= 4 ? RopeTuning{64, 2} : RopeTuning{32, narrow_tables ? 5 : 4};
  if (tuning != nullptr) t = *tuning;
  if (!FitsVectors(p, kVector<T>)) return RunKernel<T, 1, void, kPattern, 1>(p, stream, 128);
  if (p.table_dtype == p.dtype) return RunPattern<T, T, kPattern>(p, stream, t);
  if constexpr (sizeof(T) == 2) {
    if (p.table_dtype == DType::kFloat32) return RunPattern<T, float, kPattern>(p, stream, t);
  }
  return RunKernel<T, kVector<T>, void, kPattern, 2>(p, stream, 128);
}

template <class T>
void RunRope(const RopeParams& p, cudaStream_t stream, const RopeTuning* tuning) {
  switch (PatternOf(p)) {
    case Pattern::kInterleaved:
      return RunTable<T, Pattern::kInterleaved>(p, stream, tuning);
    case Pattern::kHalves:
      return RunTable<T, Pattern::kHalves>(p, stream, tuning);
    case Pattern::kToHalves:
      return RunTable<T, Pattern::kToHalves>(p, stream, tuning);
    case Pattern::kFromHalves:
      return RunTable<T, Pattern::kFromHalves>(p, stream, tuning);
  }
}

// Nothing rotates: the tensors are copied.
void CopyTensors(const RopeParams& p, cudaStream_t stream) {
  for (int i = 0; i < p.tensor_count; ++i) {
    const RopeTensor& t = p.tensors[i];
    const size_t bytes =
        static_cast<size_t>(p.batch * p.seq * t.heads * p.head_dim) * SizeOf(p.dtype);
    Check(cudaMemcpyAsync(t.out, t.in, bytes, cudaMemcpyDeviceToDevice, stream), "rope");
  }
}

}  // namespace
}  // namespace gpu

void LaunchRopeCuda(const RopeParams& p, void* stream_handle, const RopeTuning* tuning) {
  using namespace gpu;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  if (p.batch == 0 || p.seq == 0 || p.tensor_count == 0 || p.head_dim == 0) return;
  if (p.rotary_dim == 0) return CopyTensors(p, stream);
  DispatchDType(p.dtype,
                [&](auto tag) { RunRope<typename decltype(tag)::type>(p, stream, tuning); });
}

void LaunchRopeTableCuda(const RopeTableParams& p, void* stream) {
  using namespace gpu;
  const int64_t count = p.rows * (p.dim / 2);
  if (count == 0) return;
  Launch("rope table", RopeTableKernel, {dim3(GridSize(CeilDiv<int64_t>(count, 256))), dim3(256)},
         static_cast<cudaStream_t>(stream), p);
}

}  // namespace paddle_fused
