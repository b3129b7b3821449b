"""A model that is small enough for a test and real enough for vLLM."""

from pathlib import Path

import torch

VOCABULARY = 512


def tiny_model(directory: Path) -> str:
    """A random Qwen2 of two layers, large weights, so that few logits are close."""
    from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: PLC0415 - only where a test needs it

    torch.manual_seed(11)
    config = Qwen2Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        initializer_range=0.1,
        architectures=["Qwen2ForCausalLM"],
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return str(directory)
