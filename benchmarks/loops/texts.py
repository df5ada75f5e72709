"""Loops over language models of transformers: decoders, encoders, and both."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.loops.loop import (
    Batch,
    Family,
    Loop,
    Session,
    Size,
    optimizer_of,
    supervised,
)

IGNORED = -100  # a label that counts for no loss
Config = Callable[[Size], dict[str, Any]]
Batches = Callable[[Size, int], Batch]


def pretrained(
    kind: str, config: Config, size: Size, *, head: str = "AutoModelForCausalLM"
) -> nn.Module:
    """A model of transformers with random weights; all else is its default."""
    library = importlib.import_module("transformers")
    made = library.AutoConfig.for_model(kind, **config(size))
    maker = getattr(library, head)
    model: nn.Module = getattr(maker, "from_config", maker)(made)
    return model


def layers(size: Size) -> dict[str, Any]:
    """Arguments that most configurations share."""
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "intermediate_size": 2 * size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "max_position_embeddings": 2 * size.longest,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def grouped(size: Size, **more: Any) -> dict[str, Any]:
    """With fewer heads of keys and values."""
    return {**layers(size), "num_key_value_heads": size.heads // 2, **more}


def with_heads(size: Size, **more: Any) -> dict[str, Any]:
    """With a size of heads of its own."""
    return grouped(size, head_dim=size.width // size.heads, **more)


def experts(size: Size) -> dict[str, Any]:
    """With eight experts, two for each token."""
    sizes = {"moe_intermediate_size": size.width // 2}
    return with_heads(size, num_experts=8, num_experts_per_tok=2, **sizes)


def gpt(size: Size) -> dict[str, Any]:
    """GPT-2's names."""
    names = {"n_embd": size.width, "n_layer": size.layers, "n_head": size.heads}
    return {**names, "vocab_size": size.vocabulary, "n_positions": 2 * size.longest}


# --- batches


def ids(size: Size, rows: int, length: int, seed: int) -> Tensor:
    """Tokens; none is 0, 1 or 2, which stand for padding, begin and end."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, size.vocabulary, (rows, length), generator=generator)


def one_length(size: Size, k: int) -> Batch:
    """Blocks of one length."""
    tokens = ids(size, size.rows, size.longest, k)
    return {"input_ids": tokens, "labels": tokens}


def varying(size: Size, k: int) -> Batch:
    """Each batch has its length."""
    tokens = ids(size, size.rows, size.lengths(k + 1)[k], k)
    return {"input_ids": tokens, "labels": tokens}


def padded(size: Size, k: int) -> Batch:
    """Rows of many lengths, filled to the longest, with a mask."""
    of_rows = torch.tensor(size.lengths(size.rows, seed=k))
    tokens = ids(size, size.rows, int(of_rows.max()), k)
    mask = (torch.arange(tokens.shape[1]) < of_rows[:, None]).long()
    return {
        "input_ids": tokens * mask,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, IGNORED),
    }


def packed(size: Size, k: int) -> Batch:
    """Texts one after the other in one row, as `DataCollatorWithFlattening` makes them."""
    lengths = size.lengths(size.rows, seed=k)
    tokens = ids(size, 1, sum(lengths), k)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    labels = tokens.masked_fill(positions == 0, IGNORED)
    return {"input_ids": tokens, "labels": labels, "position_ids": positions}


def masked(size: Size, k: int) -> Batch:
    """Padded, with the loss of 15 % of the tokens alone."""
    batch = padded(size, k)
    chosen = torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(k)) < 0.15
    chosen[:, 0] = True
    return {**batch, "labels": batch["labels"].masked_fill(~chosen, IGNORED)}


def classified(size: Size, k: int) -> Batch:
    """Padded, with one label a row; the last batch is smaller."""
    batch = padded(size, k)
    rows = size.rows_of(k)
    inputs = {name: batch[name][:rows] for name in ("input_ids", "attention_mask")}
    return {**inputs, "labels": torch.arange(rows) % 2}


def pairs(size: Size, k: int) -> Batch:
    """A text and another one, of lengths of their own."""
    answer = ids(size, size.rows, size.lengths(k + 1, seed=1)[k], k + 1000)
    batch = padded(size, k)
    return {**batch, "labels": answer}


# --- loops


def accumulated(build: Callable[[Size], nn.Module], micro: int = 3) -> Callable[[Session], None]:
    """Micro-batches whose losses are divided by the labels of all, as Trainer does."""

    def train(session: Session) -> None:
        model = session.prepare(build(session.size).train())
        optimizer = optimizer_of(model)
        for k in range(session.steps):
            batches = [session.move(padded(session.size, micro * k + i)) for i in range(micro)]
            count = sum((batch["labels"] != IGNORED).sum() for batch in batches)
            losses = []
            for batch in batches:
                loss = model(**batch, num_items_in_batch=count).loss
                loss.backward()
                losses.append(loss.detach())
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            session.done(*losses)

    return train


def evaluated(session: Session, model: Any, k: int) -> list[Any]:
    """Every fourth step: the losses of two batches, the second one smaller, in eval mode."""
    if k % 4 != 3:
        return []
    model.eval()
    losses = []
    with torch.no_grad():
        for i in range(2):
            batch = padded(session.size, 500 + 2 * k + i)
            rows = session.size.rows - 2 * i
            cut = {name: value[:rows] for name, value in batch.items()}
            losses.append(model(**session.move(cut)).loss)
    model.train()
    return losses


def generated(session: Session, model: Any, k: int) -> list[Any]:
    """Every third step: six greedy tokens."""
    if k % 3 != 2:
        return []
    model.eval()
    prompt = session.move(ids(session.size, 2, 5 + k, k))
    tokens = model.generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    model.train()
    return [tokens.double().mean()]


def causal(
    name: str,
    kind: str,
    config: Config,
    batch: Batches = varying,
    *,
    family: Family = Family.DECODER,
    head: str = "AutoModelForCausalLM",
    between: Callable[[Session, Any, int], list[Any]] | None = None,
    **more: Any,
) -> Loop:
    """A loop over a model of transformers."""
    build = functools.partial(pretrained, kind, config, head=head)
    return Loop(name, family, supervised(build, batch, between=between), **more)


def encoder(name: str, kind: str, config: Config, batch: Batches = masked, **more: Any) -> Loop:
    """A masked language model, or a classifier."""
    head = "AutoModelForMaskedLM" if batch is masked else "AutoModelForSequenceClassification"
    return causal(name, kind, config, batch, family=Family.ENCODER, head=head, **more)


def seq2seq(name: str, kind: str, config: Config, **more: Any) -> Loop:
    """From a text to a text."""
    head = "AutoModelForSeq2SeqLM"
    return causal(name, kind, config, pairs, family=Family.SEQ2SEQ, head=head, **more)


def t5(size: Size) -> dict[str, Any]:
    """T5's names."""
    return {
        "vocab_size": size.vocabulary,
        "d_model": size.width,
        "d_kv": size.width // size.heads,
        "d_ff": 2 * size.width,
        "num_layers": size.layers,
        "num_heads": size.heads,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }


def bart(size: Size) -> dict[str, Any]:
    """BART's names."""
    sides = ("encoder", "decoder")
    return {
        "vocab_size": size.vocabulary,
        "d_model": size.width,
        **{f"{side}_layers": size.layers for side in sides},
        **{f"{side}_attention_heads": size.heads for side in sides},
        **{f"{side}_ffn_dim": 2 * size.width for side in sides},
        "max_position_embeddings": 2 * size.longest,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": 2,
    }


LLAMA = functools.partial(pretrained, "llama", grouped)
GEMMA3 = functools.partial(with_heads, sliding_window=8)
SECOND: dict[str, Any] = {"first": False}

LOOPS = [
    causal("llama", "llama", grouped, one_length),
    causal("llama-varying", "llama", grouped),
    causal("llama-mask", "llama", grouped, padded),
    Loop("llama-accumulated", Family.DECODER, accumulated(LLAMA)),
    causal("llama-eval", "llama", grouped, padded, between=evaluated),
    causal("llama-generate", "llama", grouped, padded, between=generated),
    causal("gemma3-varying", "gemma3_text", GEMMA3),
    causal("gpt-neox-varying", "gpt_neox", layers),
    causal("gpt2", "gpt2", gpt, one_length, drops=True),
    causal("gpt2-varying", "gpt2", gpt, drops=True),
    causal("qwen2-packed", "qwen2", grouped, packed),
    causal("qwen3-moe", "qwen3_moe", experts, one_length, family=Family.MOE),
    causal("qwen3-moe-varying", "qwen3_moe", experts, family=Family.MOE),
    encoder("bert-varying", "bert", layers, drops=True),
    seq2seq("t5-varying", "t5", t5, drops=True),
    causal("mistral-window", "mistral", GEMMA3, padded, **SECOND),
    causal("qwen3-mask", "qwen3", with_heads, padded, **SECOND),
    causal("gemma2-varying", "gemma2", GEMMA3, **SECOND),
    causal("phi-varying", "phi", layers, **SECOND),
    causal("phi3-mask", "phi3", grouped, padded, **SECOND),
    causal("falcon-varying", "falcon", layers, **SECOND),
    causal(
        "opt-mask",
        "opt",
        lambda size: {
            **layers(size),
            "ffn_dim": 2 * size.width,
            "word_embed_proj_dim": size.width,
        },
        padded,
        drops=True,
        **SECOND,
    ),
    causal(
        "bloom-mask",
        "bloom",
        lambda size: {
            "vocab_size": size.vocabulary,
            "hidden_size": size.width,
            "n_layer": size.layers,
            "n_head": size.heads,
        },
        padded,
        **SECOND,
    ),
    causal(
        "mixtral-mask",
        "mixtral",
        lambda size: grouped(size, num_local_experts=8),
        padded,
        family=Family.MOE,
        **SECOND,
    ),
    causal(
        "mamba",
        "mamba",
        lambda size: {
            "vocab_size": size.vocabulary,
            "hidden_size": size.width,
            "num_hidden_layers": size.layers,
            "state_size": 8,
        },
        lambda size, k: {
            name: value[:, : size.longest // 8] for name, value in one_length(size, k).items()
        },
        **SECOND,
    ),
    encoder("roberta-classes", "roberta", layers, classified, drops=True, **SECOND),
    encoder(
        "electra",
        "electra",
        lambda size: {**layers(size), "embedding_size": size.width},
        drops=True,
        **SECOND,
    ),
    encoder(
        "distilbert-classes",
        "distilbert",
        lambda size: {
            **layers(size),
            "dim": size.width,
            "n_layers": size.layers,
            "n_heads": size.heads,
            "hidden_dim": 2 * size.width,
        },
        classified,
        drops=True,
        **SECOND,
    ),
    encoder(
        "deberta-v2-classes",
        "deberta-v2",
        lambda size: {
            **layers(size),
            "pos_att_type": ["c2p", "p2c"],
            "relative_attention": True,
        },
        classified,
        drops=True,
        **SECOND,
    ),
    encoder(
        "modernbert",
        "modernbert",
        lambda size: {
            **layers(size),
            "cls_token_id": 1,
            "sep_token_id": 2,
            "local_attention": 8,
        },
        **SECOND,
    ),
    seq2seq("bart-varying", "bart", bart, drops=True, **SECOND),
]
