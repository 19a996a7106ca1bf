"""The door for a user's `config.json`: which keys a model type has, what each may be, and which of them fit each other.

A config carries many keys of the `transformers` base class that change neither a shape nor a cost: those are named here
and passed over. A key that nobody knows is refused: `num_key_value_head` would otherwise quietly make another model.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from nanum.errors import cut_short
from nanum.model.families import NOT_YET, TEXT_PARTS, TYPES, family, text_part
from nanum.model.keys import Family

_NOT_MODELLED = {
    "quantization_config": "quantized weights are not modelled",
    "compression_config": "quantized weights are not modelled",
    "add_cross_attention": "cross-attention is modelled in t5 alone",
    "is_encoder_decoder": "of encoders with decoders t5 alone is modelled",
    "pruned_heads": "pruned heads are not modelled",
    "use_bidirectional_attention": "attention in both directions is not modelled",
    "activation_dropout": "dropout within a feed-forward block is not modelled",
    "vision_config": "a vision tower is not modelled",
    "audio_config": "an audio tower is not modelled",
    "num_nextn_predict_layers": "multi-token prediction is not modelled yet",
}
"""Keys that would change the model: refused unless they are absent, null, false, 0 or empty."""

_OF_THE_BASE_CLASS = """
    model_type architectures auto_map name_or_path transformers_version torch_dtype dtype torchscript return_dict
    output_hidden_states output_attentions use_bfloat16 tf_legacy_loss chunk_size_feed_forward is_decoder
    cross_attention_hidden_size tie_encoder_decoder finetuning_task id2label label2id num_labels tokenizer_class prefix
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id task_specific_params
    problem_type max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature
    top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens use_cache
    initializer_range gradient_checkpointing attn_implementation transformers.js_config unsloth_fixed unsloth_version
    attention_implementation use_flash_attn flash_attn_2_enabled init_std cache_implementation classifier_dropout
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
"""
_OF_NUMERICS = """
    layer_norm_epsilon layer_norm_eps norm_eps norm_epsilon rms_norm_eps scale_attn_weights
    scale_attn_by_inverse_layer_idx reorder_and_upcast_attn attention_softmax_in_fp32 scale_attention_softmax_in_fp32
    masked_softmax_fusion bias_dropout_fusion slow_but_exact skip_bias_add skip_bias_add_qkv pretraining_tp
    attn_logit_softcapping query_pre_attn_scalar clip_qkv swiglu_limit logit_scale softmax_scale
    attn_temperature_tuning floor_scale attn_scale
"""
_OF_POSITIONS = """
    n_ctx rope_theta rope_scaling rope_parameters rope_interleaved rope_interleave rope_local_base_freq rope_type
    rotary rotary_emb_base rotary_base offset_alibi max_sequence_length original_max_position_embeddings
    initial_context_length learned_pos_emb use_sliding_window max_window_layers partial_rotary_factor is_llama_config
    use_mrope
"""
_OF_EXPERTS = """
    norm_topk_prob output_router_logits router_aux_loss_coef router_jitter_noise input_jitter_noise scoring_func
    topk_method n_group topk_group routed_scaling_factor seq_aux aux_loss_alpha ep_size qk_head_dim
"""
_OF_RUNTIMES = """
    inference_runner pad_key_length pre_allocate_kv_cache validate_runner_input runner_max_sequence_length layerdrop
    init_config init_device init_method verbose embedding_fraction emb_pdrop use_pad_tok_in_ffn for_llm_compressor
    tokenizer_name max_batch_size
"""
_PASSED_OVER = frozenset((_OF_THE_BASE_CLASS + _OF_NUMERICS + _OF_POSITIONS + _OF_EXPERTS + _OF_RUNTIMES).split())
"""Keys that change no shape: what a model is called, how it is generated from, rotary tables, epsilons, caps of scores,
how experts are weighed."""
_OF_SOME_FAMILY = frozenset(name for each in map(family, TYPES) for name in (*each.keys, *each.synonyms))


def reasons(config: Mapping[str, Any]) -> list[str]:
    """Every reason why `config` is not a model that can be counted; empty when it is one."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in (*TYPES, *TEXT_PARTS):
        return [_unknown(model_type)]
    if model_type in TEXT_PARTS:
        if not isinstance(config.get("text_config"), dict):
            return [f"text_config, which has the keys of a {model_type}'s text part, is missing"]
        config = text_part(config)
        model_type = TEXT_PARTS[model_type]
    own = family(model_type)
    found = [*_twice(own, config), *_invalid_values(own, config), *_unhonoured(model_type, config)]
    return found or list(own.unfit(own.values(config)))


def _unknown(model_type: Any) -> str:
    known = f"known: {', '.join((*TYPES, *TEXT_PARTS))}"
    if model_type is None:
        return f"model_type is missing ({known})"
    said = f"'{cut_short(model_type)}'" if isinstance(model_type, str) else _as_written(model_type)
    if isinstance(model_type, str) and model_type in NOT_YET:
        return f"model_type {said} is not modelled yet: it has {NOT_YET[model_type]} ({known})"
    close = difflib.get_close_matches(str(model_type), (*TYPES, *TEXT_PARTS), n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return (
        f"model_type {said} is not modelled ({hint}{known}); a model that computes the same as one of these can be "
        "stated by its keys"
    )


def _twice(own: Family, config: Mapping[str, Any]) -> Iterator[str]:
    for synonym, key in own.synonyms.items():
        if synonym in config and key in config and config[synonym] != config[key]:
            yield f"{synonym} and {key} mean the same, and differ"


def _invalid_values(own: Family, config: Mapping[str, Any]) -> Iterator[str]:
    given, written = own.named(config), {own.synonyms.get(name, name): name for name in config}
    for name, key in own.keys.items():
        if name not in given:
            if key.required:
                yield f"{name} is missing"
            continue
        value = given[name]
        if (value is not None or key.required) and not key.accepts(value):
            yield f"{written.get(name, name)} = {_as_written(value)} is not {key.says}"


def _unhonoured(model_type: str, config: Mapping[str, Any]) -> Iterator[str]:
    of = family(model_type)
    own = {*of.keys, *of.synonyms, *of.left_out, *of.ignored}
    for key, value in config.items():
        if key in own or key in _PASSED_OVER:
            continue
        if key in _NOT_MODELLED:
            if value:
                yield f"{key} = {_as_written(value)}: {_NOT_MODELLED[key]}"
        elif key in _OF_SOME_FAMILY:
            if value:
                yield f"{key} = {_as_written(value)}: a {model_type} has no such key"
        elif not key.startswith("_"):
            close = difflib.get_close_matches(key, own, n=1, cutoff=0.8)
            yield f"unknown key '{cut_short(key)}'" + (f" (did you mean {close[0]}?)" if close else "")


def _as_written(value: Any, longest: int = 60) -> str:
    """A value as JSON writes it, cut short."""
    return cut_short(json.dumps(value, ensure_ascii=False, default=str), longest)
