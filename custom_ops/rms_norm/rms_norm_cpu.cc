// CPU launchers of RMSNorm: choose the kernel for dtypes and machine, spread rows over threads, and
// add up what the rows contribute to vectors of length cols.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "custom_ops/common/cpu_memory.h"
#include "custom_ops/common/cpu_parallel.h"
#include "custom_ops/common/cpu_targets.h"
#include "custom_ops/common/dispatch.h"
#include "custom_ops/rms_norm/rms_norm.h"

namespace paddle_fused {

// What the kernels get besides the params: vectors of length cols in the accumulate type.
template <class A>
struct RmsNormVectors {
  const A* scale;      // offset + weight, or null
  const A* norm_bias;  // or null
  const A* bias;       // or null
};

// Sums over rows that one block of rows contributes, in the accumulate type; null when not needed.
template <class A>
struct RmsNormPartials {
  A* weight;
  A* norm_bias;
  A* bias;
};

#define PADDLE_FUSED_KERNEL_FILE "custom_ops/rms_norm/rms_norm_cpu_kernels.inc"
#include "custom_ops/common/foreach_cpu_target.inc"

namespace {

// A vector of length cols in the accumulate type, offset added; data() is null if src was.
template <class A>
class WideVector {
 public:
  template <class TRound>
  void Set(const void* src, DType dtype, double offset, int64_t cols, TypeTag<TRound>) {
    if (src == nullptr) return;
    buffer_.resize(static_cast<size_t>(std::max<int64_t>(cols, 1)));
    DispatchDType(dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      PADDLE_FUSED_SELECT_TARGET(WidenVector<A, T, TRound>)(src, offset, cols, buffer_.data());
    });
  }
  // For kernels of large tensors of the types T.
  template <class... T>
  void Arrange(int64_t cols) {
    if (buffer_.empty()) return;
    PADDLE_FUSED_SELECT_TARGET(ArrangeVector<A, T...>)(buffer_.data(), cols);
  }
  const A* data() const { return buffer_.empty() ? nullptr : buffer_.data(); }

 private:
  std::vector<A> buffer_;
};

// offset + weight; kNone rounds the sum to x's dtype.
template <class TX, class A>
void SetScale(WideVector<A>* scale, const void* weight, DType dtype, double offset, int64_t cols,
              CastingMode mode) {
  if (mode == CastingMode::kNone && sizeof(TX) == 2) {
    scale->Set(weight, dtype, offset, cols, TypeTag<TX>{});
  } else {
    scale->Set(weight, dtype, offset, cols, TypeTag<A>{});
  }
}

// Rows in blocks whose number depends on the row count alone: sums over rows come out the same for
// any number of threads. Within a block, kGroup rows at a time are added up before they join the
// block's total, which keeps the chains of additions short.
struct RowBlocks {
  static constexpr int64_t kGroup = 32, kMaxBlocks = 64;
  explicit RowBlocks(int64_t rows)
      : rows(rows),
        count(std::clamp<int64_t>((rows + kGroup - 1) / kGroup, 1, kMaxBlocks)),
        size((rows + count - 1) / count) {}
  int64_t Begin(int64_t block) const { return std::min(rows, block * size); }
  int64_t rows, count, size;
};

// TX and TG: the types of the large tensors.
template <class A, class TX, class TG>
class ColumnSums {
 public:
  ColumnSums(bool wanted, const RowBlocks& blocks, int64_t cols)
      : blocks_(blocks), cols_(cols), totals_(wanted ? blocks.count * cols : 0) {}

  bool wanted() const { return !totals_.empty(); }
  A* Total(int64_t block) { return wanted() ? totals_.data() + block * cols_ : nullptr; }

  void Finish(void* dst, DType dtype) const {
    if (dst == nullptr) return;
    DispatchDType(dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      PADDLE_FUSED_SELECT_TARGET(SumVectors<A, T, TX, TG>)(totals_.data(), blocks_.count, cols_,
                                                           dst);
    });
  }

 private:
  const RowBlocks& blocks_;
  int64_t cols_;
  std::vector<A> totals_;
};

// Runs rows(partials, begin, end) over the groups of one block; `sums` are the block's K sums.
template <class A, size_t K, class Sums, class Rows>
void RunBlock(Sums* const (&sums)[K], const RowBlocks& blocks, int64_t block, int64_t cols,
              const Rows& rows) {
  const int64_t begin = blocks.Begin(block), end = blocks.Begin(block + 1);
  A* totals[K];
  for (size_t k = 0; k < K; ++k) totals[k] = sums[k]->Total(block);
  if (end - begin <= RowBlocks::kGroup) return rows(totals, begin, end);
  std::vector<A> buffers[K];
  A* recent[K];
  for (size_t k = 0; k < K; ++k) {
    buffers[k].resize(sums[k]->wanted() ? cols : 0);
    recent[k] = sums[k]->wanted() ? buffers[k].data() : nullptr;
  }
  for (int64_t row = begin; row < end; row += RowBlocks::kGroup) {
    rows(recent, row, std::min(end, row + RowBlocks::kGroup));
    for (size_t k = 0; k < K; ++k) {
      if (recent[k] != nullptr) {
        PADDLE_FUSED_SELECT_TARGET(FlushVector<A>)(recent[k], totals[k], cols);
      }
    }
  }
}

template <class TX, class TY>
void RunForward(const RmsNormParams& p) {
  using A = AccOf<TX, TY>;
  WideVector<A> scale, norm_bias, bias;
  SetScale<TX>(&scale, p.weight, p.weight_dtype, p.offset, p.cols, p.mode);
  norm_bias.Set(p.norm_bias, p.norm_bias_dtype, 0, p.cols, TypeTag<A>{});
  bias.Set(p.bias, p.x_dtype, 0, p.cols, TypeTag<A>{});
  scale.template Arrange<TX, TY>(p.cols);
  norm_bias.template Arrange<TX, TY>(p.cols);
  const auto kernel = PADDLE_FUSED_SELECT_TARGET(RmsNormRows<TX, TY>);
  const int64_t bytes = p.rows * p.cols * static_cast<int64_t>(sizeof(TX) + sizeof(TY));
  const bool stream = BeyondCaches(bytes);
  ParallelFor(p.rows, bytes, [&](int64_t begin, int64_t end) {
    kernel(p, {scale.data(), norm_bias.data(), bias.data()}, stream, begin, end);
  });
}

template <class TX, class TG>
void RunBackward(const RmsNormBackwardParams& p) {
  using A = AccOf<TX, TG>;
  WideVector<A> scale;
  SetScale<TX>(&scale, p.weight, p.weight_dtype, p.offset, p.cols, p.mode);
  scale.template Arrange<TX, TG>(p.cols);
  const RowBlocks blocks(p.rows);
  using Sums = ColumnSums<A, TX, TG>;
  Sums weight(p.weight_grad != nullptr, blocks, p.cols);
  Sums norm_bias(p.norm_bias_grad != nullptr, blocks, p.cols);
  Sums bias(p.bias_grad != nullptr, blocks, p.cols);
  const auto kernel = PADDLE_FUSED_SELECT_TARGET(RmsNormBackwardRows<TX, TG>);
  const int64_t bytes = p.rows * p.cols * static_cast<int64_t>(2 * sizeof(TX) + sizeof(TG));
  const bool stream = BeyondCaches(bytes);
  ParallelFor(blocks.count, bytes, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      RunBlock<A, 3, Sums>({&weight, &norm_bias, &bias}, blocks, block, p.cols,
                           [&](A* const(&sums)[3], int64_t begin, int64_t end) {
                             kernel(p, scale.data(), {sums[0], sums[1], sums[2]}, stream, begin,
                                    end);
                           });
    }
  });
  weight.Finish(p.weight_grad, p.weight_dtype);
  norm_bias.Finish(p.norm_bias_grad, p.norm_bias_dtype);
  bias.Finish(p.bias_grad, p.x_dtype);
}

template <class T>
void RunDoubleBackward(const RmsNormDoubleBackwardParams& p) {
  using A = Acc<T>;
  WideVector<A> scale, direction;
  SetScale<T>(&scale, p.weight, p.weight_dtype, p.offset, p.cols, p.mode);
  direction.Set(p.weight_grad_grad, p.weight_dtype, 0, p.cols, TypeTag<A>{});
  const RowBlocks blocks(p.rows);
  using Sums = ColumnSums<A, A, A>;  // of a kernel that takes columns in their order
  Sums weight(p.weight_out != nullptr, blocks, p.cols);
  const auto kernel = PADDLE_FUSED_SELECT_TARGET(RmsNormDoubleBackwardRows<T>);
  const int64_t bytes = 5 * p.rows * p.cols * static_cast<int64_t>(sizeof(T));
  ParallelFor(blocks.count, bytes, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      RunBlock<A, 1, Sums>({&weight}, blocks, block, p.cols,
                           [&](A* const(&sums)[1], int64_t begin, int64_t end) {
                             kernel(p, scale.data(), direction.data(), sums[0], begin, end);
                           });
    }
  });
  weight.Finish(p.weight_out, p.weight_dtype);
}

}  // namespace

void LaunchRmsNormCpu(const RmsNormParams& p) {
  DispatchDType(p.x_dtype, [&](auto x_tag) {
    using TX = typename decltype(x_tag)::type;
    if (p.quant.enabled) return RunForward<TX, int8_t>(p);
    DispatchDType(p.y_dtype,
                  [&](auto y_tag) { RunForward<TX, typename decltype(y_tag)::type>(p); });
  });
}

void LaunchRmsNormBackwardCpu(const RmsNormBackwardParams& p) {
  DispatchDType(p.x_dtype, [&](auto x_tag) {
    using TX = typename decltype(x_tag)::type;
    DispatchDType(p.y_dtype,
                  [&](auto y_tag) { RunBackward<TX, typename decltype(y_tag)::type>(p); });
  });
}

void LaunchRmsNormDoubleBackwardCpu(const RmsNormDoubleBackwardParams& p) {
  DispatchDType(p.dtype, [&](auto tag) { RunDoubleBackward<typename decltype(tag)::type>(p); });
}

}  // namespace paddle_fused
