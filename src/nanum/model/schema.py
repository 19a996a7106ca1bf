"""The door for a user's `config.json`: which keys a model type has, what each may be, and which of them fit each other.

A config carries many keys of the `transformers` base class that change neither a shape nor a cost: those are named here
and passed over. A key that nobody knows is refused: `num_key_value_head` would otherwise quietly make another model.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from nanum.errors import cut_short
from nanum.model import ACTIVATIONS
from nanum.model.defaults import stated


def _whole(at_most: int) -> Any:
    return Field(ge=1, le=at_most, strict=True, description=f"a whole number from 1 to {at_most:,}")


# Ranges some ten times beyond any model trained. Multiplied out, at 16 bytes a parameter, they still fit 64 bits.
Hidden = Annotated[int, _whole(2**18)]
Intermediate = Annotated[int, _whole(2**20)]
Layers = Annotated[int, _whole(2**14)]
Heads = Annotated[int, _whole(2**12)]
HeadDim = Annotated[int, _whole(2**10)]
Vocabulary = Annotated[int, _whole(2**24)]
Positions = Annotated[int, _whole(2**30)]
Probability = Annotated[float, Field(ge=0, lt=1, strict=True, description="a number from 0 up to, but not, 1")]
Flag = Annotated[bool, Field(strict=True, description="true or false")]


def _known_activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise ValueError
    return name


Activation = Annotated[
    str, AfterValidator(_known_activation), Field(strict=True, description=f"one of {', '.join(ACTIVATIONS)}")
]


class _Schema(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    vocab_size: Vocabulary
    tie_word_embeddings: Flag | None = None


class Gpt2(_Schema):
    n_embd: Hidden
    n_layer: Layers
    n_head: Heads
    n_positions: Positions | None = None
    n_inner: Intermediate | None = None
    activation_function: Activation | None = None
    attn_pdrop: Probability | None = None
    resid_pdrop: Probability | None = None
    embd_pdrop: Probability | None = None


class Llama(_Schema):
    hidden_size: Hidden
    intermediate_size: Intermediate
    num_hidden_layers: Layers
    num_attention_heads: Heads
    num_key_value_heads: Heads | None = None
    head_dim: HeadDim | None = None
    max_position_embeddings: Positions | None = None
    hidden_act: Activation | None = None
    attention_bias: Flag | None = None
    mlp_bias: Flag | None = None
    attention_dropout: Probability | None = None


_SCHEMAS: dict[str, type[_Schema]] = {"gpt2": Gpt2, "llama": Llama, "mistral": Llama}

_NOT_MODELLED = {
    "num_local_experts": "experts are not modelled yet",
    "num_experts": "experts are not modelled yet",
    "n_routed_experts": "experts are not modelled yet",
    "moe_intermediate_size": "experts are not modelled yet",
    "num_experts_per_tok": "experts are not modelled yet",
    "sliding_window": "attention in a sliding window is not modelled yet",
    "quantization_config": "quantized weights are not modelled",
    "compression_config": "quantized weights are not modelled",
    "add_cross_attention": "cross-attention is not modelled",
    "is_encoder_decoder": "encoder-decoder models are not modelled",
    "pruned_heads": "pruned heads are not modelled",
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
"""
_OF_GPT2 = """
    n_ctx layer_norm_epsilon summary_type summary_use_proj summary_activation summary_proj_to_labels
    summary_first_dropout scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn
"""
_OF_LLAMA = """
    rms_norm_eps rope_theta rope_scaling rope_parameters rope_interleaved partial_rotary_factor pretraining_tp
    max_sequence_length use_sliding_window max_window_layers is_llama_config
"""
_PASSED_OVER = frozenset((_OF_THE_BASE_CLASS + _OF_GPT2 + _OF_LLAMA).split())
"""Keys that change no shape: what a model is called, how it is generated from, rotary tables, epsilons."""


def reasons(config: Mapping[str, Any]) -> list[str]:
    """Every reason why `config` is not a model that can be counted; empty when it is one."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _SCHEMAS:
        said = f"'{cut_short(model_type)}'" if isinstance(model_type, str) else _as_written(model_type)
        wrong = "is missing" if model_type is None else f"{said} is not modelled"
        return [f"model_type {wrong} (known: {', '.join(_SCHEMAS)})"]
    schema = _SCHEMAS[model_type]
    found = list(_invalid_values(schema, config)) + list(_unhonoured(schema, config))
    if model_type == "mistral" and "sliding_window" not in config:
        found.append("sliding_window is missing, which means a window of 4096 to a mistral; state null for none")
    return found or list(_unfit(config))


def _invalid_values(schema: type[_Schema], config: Mapping[str, Any]) -> Iterator[str]:
    try:
        schema.model_validate(dict(config))
    except ValidationError as error:
        for key in dict.fromkeys(str(detail["loc"][0]) for detail in error.errors(include_url=False)):
            if key not in config:
                yield f"{key} is missing"
            else:
                yield f"{key} = {_as_written(config[key])} is not {_what(schema, key)}"


def _what(schema: type[_Schema], key: str) -> str:
    """The description of a field, which stands inside the union when the field may be null."""
    described: dict[str, Any] = schema.model_json_schema()["properties"][key]
    return str(described.get("description") or described["anyOf"][0]["description"])


def _unhonoured(schema: type[_Schema], config: Mapping[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        if key in _NOT_MODELLED:
            if value:
                yield f"{key} = {_as_written(value)}: {_NOT_MODELLED[key]}"
        elif key == "layer_types":
            if not isinstance(value, list | None):
                yield f"layer_types = {_as_written(value)} is not a list"
                continue
            others = sorted({str(kind) for kind in value or ()} - {"full_attention"})
            if others:
                yield f"layer_types has {cut_short(', '.join(others))}: only full_attention is modelled yet"
        elif key not in schema.model_fields and key not in _PASSED_OVER and not key.startswith("_"):
            close = difflib.get_close_matches(key, schema.model_fields, n=1, cutoff=0.8)
            yield f"unknown key '{cut_short(key)}'" + (f" (did you mean {close[0]}?)" if close else "")


def _unfit(config: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong between values that are each right."""
    if config["model_type"] == "gpt2":
        if config["n_embd"] % config["n_head"]:
            yield f"n_head={config['n_head']} does not divide n_embd={config['n_embd']}"
        residual = stated(config, "resid_pdrop")
        embedding = stated(config, "embd_pdrop", residual)
        if (embedding > 0) != (residual > 0):
            yield f"embd_pdrop={embedding:g} but resid_pdrop={residual:g}: dropout in only one is not modelled"
        return
    hidden_size, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim")
    if head_dim is None:
        if hidden_size % heads:
            yield f"num_attention_heads={heads} does not divide hidden_size={hidden_size}, and no head_dim is given"
            head_dim = 2  # said already
        else:
            head_dim = hidden_size // heads
    if head_dim % 2:
        yield f"head_dim={head_dim} is odd, and rotary positions turn its entries in pairs"
    kv_heads = stated(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        yield f"num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}"


def _as_written(value: Any, longest: int = 60) -> str:
    """A value as JSON writes it, cut short."""
    return cut_short(json.dumps(value, ensure_ascii=False, default=str), longest)
