"""BERT for pretraining, and its two losses."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn import functional
from transformers import BertConfig, BertForPreTraining

from pretraining.architecture import HEAD_WIDTH, MODEL_SIZES
from pretraining.samples import IGNORED_LABEL, Batch


def build_model(
    size: str, vocab_size: int, seq_len: int, dropout: float, seed: int
) -> BertForPreTraining:
    """Build the model on the CPU with weights drawn from `seed`, the same on every rank."""
    shape = MODEL_SIZES[size]
    config = BertConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.hidden_size // HEAD_WIDTH,
        intermediate_size=4 * shape.hidden_size,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        max_position_embeddings=seq_len,
        attn_implementation="sdpa",
    )
    torch.manual_seed(seed)
    return BertForPreTraining(config)


class LossSums(NamedTuple):
    """Sums over one batch, each a 0-D tensor; to be divided by the counts of the global batch."""

    mlm: torch.Tensor  # fp32, cross-entropy over the masked tokens, in nats
    nsp: torch.Tensor  # fp32, cross-entropy over the samples, in nats
    num_correct: torch.Tensor  # fp32, masked tokens predicted exactly


_SHARDED_FORWARD = "sharded_loss_sums"


def shard(model: Any, device: torch.device) -> None:
    """Shard the model over all ranks by FSDP2: each layer, and the rest with the root. Collective.

    All ranks get the first one's weights, whose model alone may have those of a checkpoint.
    """
    for param in model.parameters():
        dist.broadcast(param.detach(), 0)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    modules = [*model.bert.encoder.layer, model]
    for module in modules:
        fully_shard(module, mesh=mesh)
        if device.type == "npu":  # HCCL has no mean (not run on hardware)
            module.set_force_sum_reduction_for_comms(True)
    # FSDP2 gathers in forward() alone, which loss_sums() does not call, unless it is told.
    setattr(model, _SHARDED_FORWARD, MethodType(_loss_sums, model))
    register_fsdp_forward_method(model, _SHARDED_FORWARD)


def loss_sums(model: BertForPreTraining, batch: Batch) -> LossSums:
    """Run the model; the vocabulary projection sees only the masked positions.

    Of a model after shard() this is collective.
    """
    forward = getattr(model, _SHARDED_FORWARD, functools.partial(_loss_sums, model))
    sums: LossSums = forward(batch)
    return sums


def _loss_sums(model: BertForPreTraining, batch: Batch) -> LossSums:
    mask = batch.attention_mask
    if mask.device.type != "cpu" and int(transformers.__version__.split(".")[0]) >= 5:
        # transformers 5 takes a 4-D mask as it is. It reads a 2-D one on the host, which would wait
        # for the device, and leaves it out if all tokens are attended to.
        mask = mask.bool()[:, None, None, :].expand(-1, 1, mask.size(1), -1)
    output = model.bert(
        input_ids=batch.input_ids,
        attention_mask=mask,
        token_type_ids=batch.token_type_ids,
    )
    hidden = output.last_hidden_state  # (num, seq_len, hidden_size)
    index = batch.positions[..., None].expand(-1, -1, hidden.size(-1))
    scores, nsp_scores = model.cls(hidden.gather(1, index), output.pooler_output)
    scores = scores.float().flatten(0, 1)  # (num * num_slots, vocab_size)
    labels = batch.labels.flatten()
    mlm = functional.cross_entropy(scores, labels, ignore_index=IGNORED_LABEL, reduction="sum")
    nsp = functional.cross_entropy(nsp_scores.float(), batch.is_random_next, reduction="sum")
    num_correct = (scores.detach().argmax(-1) == labels).sum().float()
    return LossSums(mlm, nsp, num_correct)
