"""The deliberate faults of tools/mutate.py: one line made wrong, and the tests that must notice.

`old` has to stand in the file exactly once; whoever rewrites a line moves its mutation along.
"""

from __future__ import annotations

from dataclasses import dataclass

SWIGLU = ("tests/ops/test_swiglu.py",)
RMS = ("tests/ops/test_rms_norm.py",)
FUSED = ("tests/ops/test_fused_rms_norm.py",)
ROPE = ("tests/ops/test_rope.py",)
ERRORS = ("tests/ops/test_errors.py",)
INVARIANT = ("tests/ops/test_invariants.py",)
GRADIENTS = ("tests/ops/test_gradients.py",)
AUTOGRAD = ("tests/ops/test_autograd_engine.py",)
STATIC = ("tests/graph/test_static_program.py",)
FAULTS = ("tests/faults",)
DISTRIBUTED = ("tests/distributed/test_two_processes.py",)
IMPORT = ("tests/package/test_import.py",)
MEMORY, THREADS = ("sanitize memory",), ("sanitize threads",)

OPS = "custom_ops/"
SIMD = OPS + "common/cpu_simd.inc"
ACCESS = OPS + "common/cpu_access.inc"
ROWS = OPS + "common/cpu_rows.inc"
SWIGLU_MATH = OPS + "swiglu/swiglu_math.h"
SWIGLU_KERNELS = OPS + "swiglu/swiglu_cpu_kernels.inc"
SWIGLU_OP = OPS + "swiglu/swiglu_op.cc"
RMS_MATH = OPS + "rms_norm/rms_norm_math.h"
RMS_KERNELS = OPS + "rms_norm/rms_norm_cpu_kernels.inc"
RMS_CPU = OPS + "rms_norm/rms_norm_cpu.cc"
RMS_HOST = OPS + "rms_norm/rms_norm_host.h"
ROPE_MATH = OPS + "rope/rope_math.h"
ROPE_KERNELS = OPS + "rope/rope_cpu_kernels.inc"
ROPE_CPU = OPS + "rope/rope_cpu.cc"
ROPE_OP = OPS + "rope/rope_op.cc"
TENSOR = OPS + "paddle/tensor.h"
SPMD = OPS + "paddle/spmd.h"
CHECKS = "paddle_fused/_checks.py"
ROPE_PY = "paddle_fused/nn/functional/rope.py"
RMS_PY = "paddle_fused/nn/functional/rms_norm.py"
SWIGLU_PY = "paddle_fused/nn/functional/swiglu.py"


@dataclass(frozen=True)
class Mutation:
    """One fault."""

    kind: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


_ROWS = [
    # Vectors, tails and sums
    (
        "tail of a row dropped",
        ROWS,
        "if (j < cols) body(j, static_cast<int>(cols - j), Vec<A>{});",
        "",
        RMS,
    ),
    (
        "tail of a sum dropped",
        ROWS,
        "for (int lane = 0; j < end; j += kLanes<A>, lane += kLanes<A>) {",
        "for (int lane = 0; j + kLanes<A> <= end; j += kLanes<A>, lane += kLanes<A>) {",
        RMS,
    ),
    (
        "reduction over half of the lanes",
        ROWS,
        "for (; width > 0; width /= 2) {",
        "for (; width > 1; width /= 2) {",
        RMS,
    ),
    (
        "load without a mask",
        ACCESS,
        "__builtin_memcpy(buffer, p, n * sizeof(T));",
        "__builtin_memcpy(buffer, p, sizeof(buffer));",
        MEMORY,
    ),
    (
        "store without a mask",
        ACCESS,
        "__builtin_memcpy(p, buffer, n * sizeof(T));",
        "__builtin_memcpy(p, buffer, sizeof(buffer));",
        MEMORY,
    ),
    (
        "column totals in bfloat16",
        RMS_KERNELS,
        "sum = sum + S::LoadOwn(src + i * cols + j, n);",
        "sum = RoundTo<BFloat16, A>(sum + S::LoadOwn(src + i * cols + j, n));",
        RMS,
    ),
    (
        "sum of a row in bfloat16",
        ROWS,
        "for (int k = 0; k < K; ++k) acc[k][w] = acc[k][w] + t[k];",
        "for (int k = 0; k < K; ++k) acc[k][w] = RoundTo<BFloat16, A>(acc[k][w] + t[k]);",
        SWIGLU,
    ),
    (
        "partial sums not cleared",
        RMS_KERNELS,
        "Store(recent + j, Vec<A>{}, n);",
        "",
        RMS,
    ),
    (
        "order of additions by thread count",
        RMS_CPU,
        "count(std::clamp<int64_t>((rows + kGroup - 1) / kGroup, 1, kMaxBlocks)),",
        "count(std::clamp<int64_t>(NumThreads(), 1, kMaxBlocks)),",
        INVARIANT,
    ),
    (
        "scratch shared by the threads",
        ROPE_CPU,
        "std::vector<Acc<T>> scratch(",
        "static std::vector<Acc<T>> scratch(",
        THREADS,
    ),
    # Conversions
    (
        "bfloat16 by truncation",
        SIMD,
        "return u + ((0x7fffu + ((u >> 16) & 1u)) & ~(U32)(v != v));",
        "return u;",
        SWIGLU,
    ),
    (
        "bfloat16 ties away from zero",
        SIMD,
        "return u + ((0x7fffu + ((u >> 16) & 1u)) & ~(U32)(v != v));",
        "return u + (0x8000u & ~(U32)(v != v));",
        FAULTS,
    ),
    (
        "NaN rounded like a number",
        SIMD,
        "return u + ((0x7fffu + ((u >> 16) & 1u)) & ~(U32)(v != v));",
        "return u + (0x7fffu + ((u >> 16) & 1u));",
        INVARIANT,
    ),
    (
        "one instruction set truncates float16",
        SIMD,
        "(U16)_mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT)",
        "(U16)_mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_ZERO)",
        INVARIANT,
    ),
    (
        "float16 infinities on one instruction set",
        SIMD,
        "const U32 special = (U32)(body >= 0x0f800000u);",
        "const U32 special = (U32)(body > 0x0f800000u);",
        FAULTS,
    ),
    (
        "dtype branch missing",
        OPS + "common/dispatch.h",
        "return body(TypeTag<BFloat16>{});",
        "return body(TypeTag<Float16>{});",
        SWIGLU,
    ),
    # SwiGLU
    (
        "exponential of a positive number",
        SWIGLU_MATH,
        "const V e = ExpNonPositive(-Abs(a));",
        "const V e = ExpNonPositive(Abs(a));",
        SWIGLU,
    ),
    (
        "wrong sign in the derivative",
        SWIGLU_MATH,
        "return {(g * b) * (sig.s + sig.silu * sig.t), g * sig.silu};",
        "return {(g * b) * (sig.s - sig.silu * sig.t), g * sig.silu};",
        SWIGLU,
    ),
    (
        "halves swapped",
        SWIGLU_OP,
        "static_cast<const char*>(gate) + width / 2 * SizeOf(dtype)",
        "static_cast<const char*>(gate) + 0 * SizeOf(dtype)",
        SWIGLU,
    ),
    (
        "probability missing in the gradient",
        SWIGLU_KERNELS,
        "SwigluBackward(b, g * prob, sig)",
        "SwigluBackward(b, g, sig)",
        SWIGLU,
    ),
    (
        "elements beyond float32's range not computed again",
        SWIGLU_KERNELS,
        "return AnyAbove(size, (kInputBinades << 24) - 0x7fffffff - 1);",
        "return (void)size, false;",
        FAULTS + SWIGLU,
    ),
    (
        "the same for bfloat16",
        SWIGLU_KERNELS,
        "return AnyAbove(size, (kInputBinades << 8) - 0x8000);",
        "return (void)size, false;",
        FAULTS + SWIGLU,
    ),
    (
        "weights in another order than the columns",
        ROWS,
        "S::StoreOwn(p + j, S::Load(p + j, n), n);",
        "S::StoreOwn(p + j, S::LoadOwn(p + j, n), n);",
        RMS,
    ),
    (
        "a NaN that rounding turns into a number",
        SIMD,
        "return v != v ? std::numeric_limits<A>::quiet_NaN() : v;",
        "return v;",
        INVARIANT,
    ),
    (
        "probability in its own gradient",
        SWIGLU_KERNELS,
        "value * prob, g * value};",
        "value * prob, g * value * prob};",
        SWIGLU,
    ),
    (
        "products that leave float32's range",
        SWIGLU_KERNELS,
        "const I32 stray = StrayGates(a) | StrayLanes(value, a, b);",
        "const I32 stray = I32{} & (I32)value & (I32)(a + b);",
        SWIGLU,
    ),
    (
        "int32 row offset",
        SWIGLU_KERNELS,
        "const T* gate = static_cast<const T*>(p.gate) + row * p.in_stride;\n    const T* up",
        "const T* gate = static_cast<const T*>(p.gate) + static_cast<int>(row * p.in_stride);\n"
        "    const T* up",
        MEMORY,
    ),
    (
        "gradient written over the input",
        SWIGLU_OP,
        "std::vector<Tensor> results{EmptyLike(x)};",
        "std::vector<Tensor> results{x};",
        INVARIANT,
    ),
    (
        "empty sum left unwritten",
        SWIGLU_OP,
        "results.push_back(p.cols == 0 ? paddle::full",
        "results.push_back(false ? paddle::full",
        FAULTS,
    ),
    (
        "silence instead of a second-order gradient",
        SWIGLU_OP,
        "  (void)x;\n  PADDLE_THROW(",
        "  if (x.defined()) return {x};\n  PADDLE_THROW(",
        GRADIENTS,
    ),
    (
        "unknown size halved",
        SWIGLU_OP,
        "if (!shape.empty() && shape.back() >= 0) shape.back() /= 2;",
        "if (!shape.empty()) shape.back() /= 2;",
        STATIC,
    ),
    (
        "inferred dtype of the first input",
        SWIGLU_OP,
        "return {o1, probs, do2_s};\n}\n\n}",
        "(void)probs, (void)do2_s;\n  return {o1, o1, o1};\n}\n\n}",
        STATIC,
    ),
    # RMSNorm
    (
        "epsilon outside the root",
        RMS_KERNELS,
        "std::sqrt(static_cast<double>(sum) / static_cast<double>(cols) + epsilon));",
        "(std::sqrt(static_cast<double>(sum) / static_cast<double>(cols)) + epsilon));",
        RMS,
    ),
    (
        "mean over one element too few",
        RMS_KERNELS,
        "std::sqrt(static_cast<double>(sum) / static_cast<double>(cols) + epsilon));",
        "std::sqrt(static_cast<double>(sum) / static_cast<double>(cols - 1) + epsilon));",
        RMS,
    ),
    (
        "squares beyond the range",
        RMS_KERNELS,
        "if (!SquaresAreSafe(sum, cols, epsilon)) return SafeInvRms<A>(x, cols, epsilon);",
        "if (cols < 0) return SafeInvRms<A>(x, cols, epsilon);",
        RMS,
    ),
    (
        "projection missing in the gradient",
        RMS_MATH,
        "return r * NegMulAdd(z, mean_mz, m);",
        "return r * NegMulAdd(z, 0 * mean_mz, m);",
        RMS,
    ),
    (
        "weight missing in the gradient's sum",
        RMS_KERNELS,
        "t[1] = upstream(j, n, V{}) * LoadOr<V>(scale, j, n, A{1}) * v;",
        "t[1] = upstream(j, n, V{}) * v;",
        RMS,
    ),
    (
        "weight gradient of the raw row",
        RMS_KERNELS,
        "Accumulate(partials.weight, j, n, g * Normalised<A, TX>(v, r, round_hat));",
        "Accumulate(partials.weight, j, n, g * v);",
        RMS,
    ),
    (
        "weight gradient divided out of the output",
        RMS_KERNELS,
        "Accumulate(partials.weight, j, n, g * Normalised<A, TX>(v, r, round_hat));",
        "Accumulate(partials.weight, j, n, g * (v * r * LoadOr<V>(scale, j, n, A{1}) / "
        "LoadOr<V>(scale, j, n, A{1})));",
        RMS,
    ),
    (
        "offset of the weight forgotten",
        RMS_KERNELS,
        "Store(rounded, Load<double>(from + j, n) + offset);",
        "Store(rounded, Load<double>(from + j, n) + 0 * offset);",
        RMS,
    ),
    (
        "rounding step of a mode skipped",
        RMS_KERNELS,
        "if (!round_hat) return z;",
        "return z;",
        RMS,
    ),
    (
        "gradient of the residual's other use lost",
        RMS_KERNELS,
        "dx = dx + Step<V>::Load(static_cast<const TX*>(p.residual_out_grad) + at + j, n);",
        "",
        RMS,
    ),
    (
        "ties of int8 the other way",
        RMS_KERNELS,
        "q.round_half_away ? std::round(lanes[i]) : std::nearbyint(lanes[i])",
        "q.round_half_away ? std::nearbyint(lanes[i]) : std::round(lanes[i])",
        FUSED,
    ),
    (
        "weight gradient of no rows left unwritten",
        RMS_HOST,
        "return written ? EmptyLike(t) : paddle::full(t.shape(), 0, t.dtype(), t.place());",
        "(void)written;\n  return EmptyLike(t);",
        INVARIANT,
    ),
    (
        "condition of a frozen weight inverted",
        RMS_PY,
        "return not weight.stop_gradient",
        "return weight.stop_gradient",
        RMS,
    ),
    # RoPE
    (
        "sine's sign in the backward",
        ROPE_MATH,
        "RopeSines<V>{s2, -s1}",
        "RopeSines<V>{-s1, s2}",
        ROPE,
    ),
    (
        "own sine in the transposed rotation",
        ROPE_MATH,
        "RopeSines<V>{s2, -s1}",
        "RopeSines<V>{s1, -s2}",
        ROPE,
    ),
    (
        "pairing inverted",
        ROPE_PY,
        "pairing = INTERLEAVED if adjacent else HALVES",
        "pairing = HALVES if adjacent else INTERLEAVED",
        ROPE,
    ),
    (
        "first table for all sequences",
        ROPE_KERNELS,
        "b * p.table_batch_stride + row * p.rotary_dim",
        "row * p.rotary_dim",
        ROPE,
    ),
    (
        "positions ignored",
        ROPE_KERNELS,
        "p.position_ids == nullptr ? s :",
        "p.position_ids == nullptr || p.seq > 0 ? s :",
        ROPE,
    ),
    (
        "int32 positions read as int64",
        ROPE_KERNELS,
        "return int32 ? static_cast<const int32_t*>(ids)[index] :",
        "return int32 && index < 0 ? 0 :",
        MEMORY,
    ),
    (
        "position of one row too many",
        ROPE_CPU,
        "if (id < 0 || id >= table_rows) {",
        "if (id < 0 || id > table_rows) {",
        ERRORS,
    ),
    (
        "negative position",
        ROPE_CPU,
        "if (id < 0 || id >= table_rows) {",
        "if (id >= table_rows) {",
        ERRORS,
    ),
    (
        "rest of a partial head not copied",
        ROPE_KERNELS,
        "if (end < p.head_dim) std::memcpy",
        "if (end > p.head_dim) std::memcpy",
        ROPE,
    ),
    (
        "angles in float",
        ROPE_CPU,
        "const double angle = position * frequency[i];",
        "const double angle = static_cast<float>(position * frequency[i]);",
        ROPE,
    ),
    (
        "int32 token offset",
        ROPE_KERNELS,
        "const int64_t at = b * t.batch_stride + s * t.seq_stride;",
        "const int64_t at = static_cast<int>(b * t.batch_stride + s * t.seq_stride);",
        MEMORY,
    ),
    (
        "one head count for all",
        ROPE_OP,
        "t.heads = shape[attrs.HeadAxis()];",
        "t.heads = std::min<int64_t>(shape[attrs.HeadAxis()], 2);",
        ROPE,
    ),
    (
        "time_major ignored",
        ROPE_PY,
        "layout = SEQ_BATCH_HEADS if major else BATCH_SEQ_HEADS",
        "layout = BATCH_SEQ_HEADS",
        ROPE,
    ),
    # Checks, autograd, import
    (
        "a weight's gradient not summed over processes",
        SPMD,
        "axes.sum = roles[like] == 'v';",
        "axes.sum = false;",
        DISTRIBUTED,
    ),
    ("dtype unchecked", CHECKS, "if not _is_one_of(dtype, dtypes):", "if False:", ERRORS),
    (
        "NaN epsilon accepted",
        CHECKS,
        "if not 0.0 <= value < math.inf:",
        "if value < 0.0 or value == math.inf:",
        ERRORS,
    ),
    (
        "shape check that broadcasts",
        CHECKS,
        "return a == b or a < 0 or b < 0",
        "return a == b or a < 0 or b < 0 or a == 1",
        ERRORS,
    ),
    (
        "bool taken for a number",
        CHECKS,
        "if isinstance(value, bool) or not isinstance(value, numbers.Real):",
        "if not isinstance(value, numbers.Real):",
        ERRORS,
    ),
    (
        "odd width accepted",
        SWIGLU_PY,
        "if shape[-1] >= 0 and shape[-1] % 2:",
        "if shape[-1] >= 0 and shape[-1] % 2 and len(shape) > 9:",
        ERRORS,
    ),
    (
        "second input's shape unchecked",
        SWIGLU_PY,
        'checks.check_shape("swiglu", "y", y_shape, shape, "x\'s")',
        "pass",
        ERRORS,
    ),
    (
        "shape of a gradient unchecked",
        TENSOR,
        "grad.is_dense_tensor() && grad.dtype() == dtype && grad.shape() == shape,",
        "grad.is_dense_tensor() && grad.dtype() == dtype && shape.size() < 99,",
        AUTOGRAD,
    ),
    (
        "no_grad ignored",
        "paddle_fused/_ops.py",
        "if not paddle.is_grad_enabled() and is_dygraph():",
        "if False:",
        AUTOGRAD,
    ),
    (
        "thread pool used after fork",
        OPS + "common/cpu_parallel.cc",
        "if (g_forked.load(std::memory_order_relaxed)) return 1;",
        "",
        INVARIANT,
    ),
    (
        "other Paddle version accepted",
        "paddle_fused/_library.py",
        "if _minor(built) != _minor(paddle_version):",
        "if False:",
        IMPORT,
    ),
    (
        "truncated library loaded",
        "paddle_fused/_library.py",
        "if not _is_whole(_LIBRARY):",
        "if False:",
        IMPORT,
    ),
]
MUTATIONS = [Mutation(*row) for row in _ROWS]
