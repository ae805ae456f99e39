"""The questions that `make test` asks: cheap programs of every family, planted and healthy; the others are slow."""

from __future__ import annotations

_NAMES = {
    "truth": """
        delayed_scaling equal_keys decayed isolated_node_in_a_graph identical_pair infinite_label warm_up_too_far
        padded_text broken_sensor box_area_in_pixels contrastive_unit_length squared_distances_in_a_point_cloud
        balances_in_dollars library_clip_of_half_gradients fine_texture feature_grid weather_table popular_items kelvin
        gradients_kept_after_a_skipped_step scale_set_by_hand_in_update constant_scale_without_a_check
        scaler_made_anew_each_step value_clip_before_unscale silent_speaker_in_a_mixture noisy_or_of_forty_tiles
        silence_in_a_log_mel_frontend likelihood_as_a_product linear_attention_without_a_positive_key
        model_half_with_adam adapters_kept_in_half tiny_loss_weight_and_default_eps large_eps_taken_from_a_recipe
        recalibrate delayed_scaling_fixed decayed_fixed isolated_node_in_a_graph_fixed broken_sensor_fixed
        identical_pair_fixed box_area_in_pixels_fixed contrastive_unit_length_fixed fine_texture_fixed
        physics_informed_fixed scaler_made_anew_each_step_fixed scale_set_by_hand_in_update_fixed
        silent_speaker_in_a_mixture_fixed noisy_or_of_forty_tiles_fixed adapters_kept_in_half_fixed
        model_half_with_adam_fixed gan_with_two_optimizers schedule_down_to_zero ppo_with_fp32_logprobs
    """,
    "diagnose": """
        angle_between_equal_directions logarithm_of_an_empty_count warm_up_too_far raw_pixels raw_feature loud_layer
        attention_scores hand_written_norm loss_in_half contrastive_loss cumulative_sum gated_product
        clipping_by_a_norm_in_half scale_of_yesterday router_with_ties labels_of_a_rounded_teacher ids_kept_in_bf16
        saturated_probabilities deaf_residual_stream offset_before_a_difference preference_of_sums layernorm_rows
        rotary_positions offset_in_the_root small_terms_after_a_large_start logits_with_offset embedding_with_many_hits
        gradients_left_from_a_bad_step loss_scaled_by_hand constant_feature squares_below_the_range
        gradients_without_scaler adam_in_half tiny_loss_weight_and_default_eps updates_in_bf16 statistics_kept_in_bf16
        one_wrong_reading divided_by_hand_and_by_the_scaler penalty_beyond_the_range square_beyond_every_range
        average_by_subtraction closure_that_overflows a_penalty_that_is_turned_up
        delayed_scaling_fixed fully_masked_row_fixed logarithm_of_an_empty_count_fixed loss_in_half_fixed
        ids_kept_in_bf16_fixed gradients_left_from_a_bad_step_fixed gradients_without_scaler_fixed updates_in_bf16_fixed
        weights_in_low_precision_that_move frozen_and_unused_parts integer_features zero_head large_targets
    """,
    "monitor": """
        constant_feature loss_scaled_by_hand nan_in_the_batch logarithm_of_an_empty_count gradients_left_from_a_bad_step
        box_area_in_pixels contrastive_loss cumulative_sum squares_below_the_range raw_feature
        silent_speaker_in_a_mixture adam_in_half updates_in_bf16 delayed_scaling_fixed fully_masked_row_fixed
        logarithm_of_an_empty_count_fixed loss_in_half_fixed ids_kept_in_bf16_fixed gradients_left_from_a_bad_step_fixed
        silent_speaker_in_a_mixture_fixed updates_in_bf16_fixed weights_in_low_precision_that_move
        frozen_and_unused_parts integer_features
    """,
    "examine": """
        decay_that_rounds_to_one fully_masked_row root_of_zero nan_in_the_batch poisoned_statistics raw_feature
        loud_layer attention_scores hand_written_norm loss_out_of_range exp_in_the_root cumulative_sum gated_product
        clipping_by_a_norm_in_half scale_of_yesterday router_with_ties labels_of_a_rounded_teacher ids_kept_in_bf16
        saturated_probabilities deaf_residual_stream offset_before_a_difference preference_of_sums layernorm_rows
        positions_of_four_thousand large_offset logits_with_offset hits_counted_in_bf16 gradients_left_from_a_bad_step
        loss_scaled_by_hand functional_normalize squares_below_the_range gradients_without_scaler adam_in_half
        updates_in_bf16 mean_teacher decayed_fixed delayed_scaling_fixed fully_masked_row_fixed root_of_zero_fixed
        nan_in_the_batch_fixed loss_in_half_fixed exponential_fixed ids_kept_in_bf16_fixed popular_items_fixed
        gradients_left_from_a_bad_step_fixed loss_scaled_by_hand_fixed gradients_without_scaler_fixed
        product_of_probabilities_fixed recalibrate_fixed updates_in_bf16_fixed average_of_weights_in_fp32
        integer_features weights_in_low_precision_that_move frozen_and_unused_parts adapters_on_a_frozen_bf16_model
        zero_head large_targets raw_inputs
    """,
    "diff": """
        gated_product sum_out_of_range embedding_rows slope_by_a_small_step layernorm_rows rotary_positions
        logarithm_of_one_plus focal_loss small_terms_after_a_large_start hits_counted_in_bf16
        hours_rounded_before_their_angles constant_feature product_of_probabilities gated_product_fixed
        hours_rounded_before_their_angles_fixed tiny_eps_fixed decay_that_always_rounds_up_fixed recurrent
        integer_features saturated zero_head dead_units large_targets
    """,
    "whatif": """
        raw_inputs zero_head loud_layer raw_feature squares_of_a_wide_layer balances_in_dollars
    """,
    "diagnose variants": """
        tiny_eps fully_masked_row updates_in_bf16
    """,
    "examine variants": """
        tiny_eps gated_product variance_of_squares rotary_positions updates_in_bf16 squares_of_a_wide_layer loss_in_half
    """,
    "diff variants": """
        tiny_eps gated_product variance_of_squares large_stream
    """,
}
QUICK = {question: frozenset(names.split()) for question, names in _NAMES.items()}
