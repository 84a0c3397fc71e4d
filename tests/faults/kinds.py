"""Kinds of faults that packages of fused operators have had, and the tests that would see them.

Each case is a line: what went wrong there, and tests as file::function under tests/. docs/
reliability.md has the table of kinds; test_kinds.py holds both to what is there.
"""

from __future__ import annotations

NUMBERS, GRAPHS = "faults/test_numbers.py::", "faults/test_graphs.py::"
SWIGLU, RMS, FUSED = (
    "ops/test_swiglu.py::",
    "ops/test_rms_norm.py::",
    "ops/test_fused_rms_norm.py::",
)
ROPE, ERRORS, INVARIANT = "ops/test_rope.py::", "ops/test_errors.py::", "ops/test_invariants.py::"
GRADIENTS, STATIC = "ops/test_gradients.py::", "graph/test_static_program.py::"
EXPORT, IMPORT = "graph/test_export.py::", "package/test_import.py::"
INSTALL, GPU = "package/test_install.py::", "gpu/test_gpu_faults.py::"

KINDS: dict[str, dict[str, list[str]]] = {
    "empty tensors": {
        "weight gradient of no rows is not zero": [
            RMS + "test_empty",
            INVARIANT + "test_results_after_poisoned_memory",
        ],
        "a launch of no blocks fails later": [GPU + "test_no_rows_leave_no_error_behind"],
        "an optional input without elements counts as given": [
            ROPE + "test_k_without_heads_leaves_q_alone",
            ERRORS + "test_wrong_shape",
        ],
        "statistics of rows without columns": [
            GRAPHS + "test_statistics_of_rows_without_columns",
            GRAPHS + "test_probability_gradient_of_rows_without_columns",
        ],
    },
    "index width and limits of a launch": {
        "gates beyond 2^31 elements": [GPU + "test_more_than_2_to_31_elements_of_gates"],
        "rows beyond 2^31 elements": [GPU + "test_more_than_2_to_31_elements_of_rows"],
        "heads beyond 2^31 elements": [GPU + "test_more_than_2_to_31_elements_of_heads"],
        "shared memory reused without a barrier": [GPU + "test_no_races_between_rows_of_a_block"],
        "rows wider than shared memory": [
            NUMBERS + "test_rows_wider_than_fast_memory",
            NUMBERS + "test_wide_gates",
        ],
    },
    "vector width, tails, alignment": {
        "second half of a row off alignment": [
            NUMBERS + "test_second_half_of_a_row_off_alignment",
            GPU + "test_rows_off_alignment",
        ],
        "vector width from a common divisor": [NUMBERS + "test_widths_without_a_common_vector"],
        "odd rotary width": [ERRORS + "test_wrong_shape", ERRORS + "test_wrong_tables"],
        "several narrow rows in one block": [NUMBERS + "test_many_narrow_rows"],
        "vector path and tail round differently": [
            NUMBERS + "test_full_vectors_and_tails_round_alike",
            GPU + "test_full_vectors_and_tails_round_alike",
        ],
        "shuffle with lanes that are absent": [
            RMS + "test_widths",
            GPU + "test_every_width_of_a_warp",
        ],
    },
    "strides and layout": {
        "strided input read as contiguous": [GRAPHS + "test_transposed_input"],
        "slice whose rows lie apart": [
            GRAPHS + "test_slices_of_a_fused_projection",
            ROPE + "test_heads_of_a_fused_projection",
        ],
        "output inherits the input's strides": [
            INVARIANT + "test_a_transposed_input_gives_a_contiguous_output"
        ],
    },
    "dtypes": {
        "dtype without a branch returns garbage": [
            ERRORS + "test_wrong_dtype",
            NUMBERS + "test_documented_dtypes_are_those_that_work",
        ],
        "weight read with the input's dtype": [
            NUMBERS + "test_half_rows_with_a_float32_weight",
            ERRORS + "test_mixed_dtypes",
        ],
        "output takes the weight's dtype": [NUMBERS + "test_half_rows_with_a_float32_weight"],
        "documented dtypes and kernels differ": [
            NUMBERS + "test_documented_dtypes_are_those_that_work"
        ],
    },
    "range and epsilon": {
        "squares overflow float16": [RMS + "test_float16_squares_beyond_float16"],
        "squares overflow float32": [RMS + "test_float32_rows_whose_squares_leave_the_range"],
        "epsilon outside the root, or by dtype": [
            NUMBERS + "test_epsilon_stands_inside_the_root",
            NUMBERS + "test_default_epsilon_is_one_constant",
        ],
        "epsilon underflows": [RMS + "test_zero_row_with_an_epsilon_below_float16"],
        "gradient divides by the weight": [RMS + "test_zero_weights_do_not_divide"],
    },
    "precision and rounding": {
        "order of rounding not fixed": [RMS + "test_weight_dtypes"],
        "sums in the storage dtype": [
            NUMBERS + "test_weight_gradient_of_many_half_rows",
            NUMBERS + "test_probability_gradient_of_a_wide_half_row",
            RMS + "test_long_weight_sums_do_not_stall",
        ],
        "angles in half precision": [
            ROPE + "test_generated_tables_tell_long_positions_apart",
            ROPE + "test_generated_tables",
        ],
        "contraction differs between devices": [
            NUMBERS + "test_rotation_and_norm_of_one_small_half_case",
            INVARIANT + "test_cpu_targets",
        ],
        "tolerance larger than the values": [
            NUMBERS + "test_no_test_rests_on_an_absolute_tolerance",
            NUMBERS + "test_small_values_are_measured_relatively",
        ],
        "float64 computed in float32": [GRADIENTS + "test_central_differences"],
    },
    "gradients": {
        "weight never trains": [GRAPHS + "test_what_should_train_trains"],
        "stop_gradient read wrongly": [
            GRADIENTS + "test_stop_gradient",
            STATIC + "test_gradients_are_those_of_dygraph",
        ],
        "gradient slots shifted": [GRAPHS + "test_gradients_arrive_in_their_own_slots"],
        "partial sums not initialised": [
            RMS + "test_weight_gradient_of_one_vector_of_zeros",
            NUMBERS + "test_fewer_rows_than_partial_sums",
        ],
        "no gradient, no message": [
            SWIGLU + "test_result_shares_the_graph",
            GRADIENTS + "test_gradients_that_are_not_differentiable",
        ],
        "gradient written over an input": [INVARIANT + "test_nothing_is_written_but_outputs"],
        "fused path falls through to the plain one": [NUMBERS + "test_weight_is_applied_once"],
        "residual's gradient added at the wrong place": [RMS + "test_residual"],
    },
    "shapes and options": {
        "probability gradient in another shape": [SWIGLU + "test_ranks"],
        "axis unchecked": [FUSED + "test_begin_norm_axis", ERRORS + "test_wrong_value"],
        "0-D tensors slip through": [ERRORS + "test_wrong_shape"],
        "no weight": [RMS + "test_weight_dtypes"],
        "rank assumed": [ERRORS + "test_wrong_shape"],
        "option means two things": [ERRORS + "test_unknown_keywords_are_refused"],
    },
    "meaning of rotary embedding": {
        "first table for all sequences": [ROPE + "test_fused"],
        "position outside the table": [
            ERRORS + "test_position_outside_the_tables",
            ERRORS + "test_wrong_tables",
        ],
        "one head count for q, k and v": [ROPE + "test_fused"],
        "single head not rotated": [GRAPHS + "test_one_head_is_rotated"],
        "partial rotary": [ROPE + "test_fused", ROPE + "test_applied"],
        "pairing inverted": [ROPE + "test_the_two_pairings"],
        "time_major ignored": [ROPE + "test_generated_tables_of_all_heads_and_axes"],
    },
    "races and devices": {
        "missing barrier": [GPU + "test_no_races_between_rows_of_a_block"],
        "floating-point atomics": [GPU + "test_no_races_between_rows_of_a_block"],
        "inputs on two devices": [GPU + "test_inputs_on_two_devices"],
    },
    "graphs, export, inference": {
        "operators not registered in the serving process": [EXPORT + "test_llama_block"],
        "unknown size in arithmetic": [STATIC + "test_infers_and_computes"],
        "output dtype inferred from the first input": [STATIC + "test_infers_and_computes"],
        "empty result is None": [EXPORT + "test_operators_compute_the_same_bits_elsewhere"],
    },
    "mixed precision and recomputation": {
        "mixed precision casts nothing": [GRAPHS + "test_mixed_precision"],
        "recomputation with a None": [GRAPHS + "test_recomputation"],
    },
    "build, install, import": {
        "undefined symbol": [INSTALL + "test_every_symbol_is_found"],
        "CPU build wants CUDA": [
            INSTALL + "test_works_from_elsewhere_where_nothing_can_be_written"
        ],
        "installed but not importable": [
            INSTALL + "test_works_from_elsewhere_where_nothing_can_be_written"
        ],
        "an operator's name taken": [
            IMPORT + "test_import_is_silent_and_leaves_paddle_alone",
            INSTALL + "test_nothing_of_paddle_changes",
            INSTALL + "test_beside_a_second_package_of_operators",
        ],
        "several processes build at once": [
            INSTALL + "test_four_processes_import_at_once",
            INSTALL + "test_import_starts_no_compiler",
        ],
    },
    "memory shared in autograd": {
        "gradient of norm(x) + x": [GRAPHS + "test_tensors_with_several_uses"],
        "gradient of two norms of one input": [GRAPHS + "test_tensors_with_several_uses"],
        "norm and an earlier residual": [GRAPHS + "test_tensors_with_several_uses"],
        "gate that remembers its output": [GRAPHS + "test_tensors_with_several_uses"],
        "gate with another use": [GRAPHS + "test_tensors_with_several_uses"],
        "second backward differs": [GRAPHS + "test_a_second_backward_gives_the_same"],
        "leaf's data replaced": [GRAPHS + "test_a_second_backward_gives_the_same"],
        "caller's q and k rotated": [GRAPHS + "test_storage_of_heads_last_is_not_rotated_in_place"],
        "upstream gradient overwritten": [GRAPHS + "test_a_second_backward_gives_the_same"],
        "wrong rotary arguments accepted": [
            ERRORS + "test_wrong_shape",
            ERRORS + "test_wrong_tables",
            ERRORS + "test_position_outside_the_tables",
        ],
        "short second operand read beyond": [ERRORS + "test_wrong_shape"],
        "float64 backward missing": [GRADIENTS + "test_central_differences"],
        "second order without a graph": [
            GRADIENTS + "test_second_order_central_differences",
            GRADIENTS + "test_second_order_that_does_not_exist_raises",
        ],
        "epsilon of 0 replaced": [RMS + "test_float32_rows_whose_squares_leave_the_range"],
    },
}
