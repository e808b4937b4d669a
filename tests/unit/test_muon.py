"""ShardedMuon's words, its groups, its owners and its formula, on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz

from shardfuse import ShardedMuon
from shardfuse.comm.transport import SingleRank
from shardfuse.engine.matrices import MatrixExchange
from shardfuse.engine.params import OwnShards
from shardfuse.layout import FlatLayout, Fragment, ParamSpec, dense_stride
from shardfuse.rules.muon import NS_COEFFICIENTS, MuonRule, orthogonalize


def ones(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape))


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (64, 96)])
def test_iteration_is_that_of_torch(shape: tuple[int, int]) -> None:
    """Bit for bit, three matrices at a time; singular values become about 1."""
    generator = torch.Generator().manual_seed(1)
    matrices = torch.randn(3, *shape, generator=generator).bfloat16()
    expected = [_zeropower_via_newtonschulz(m.clone(), NS_COEFFICIENTS, 5, 1e-7) for m in matrices]
    found = orthogonalize(matrices.clone(), NS_COEFFICIENTS, 5, eps=1e-7)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    values = torch.linalg.svdvals(found.double())
    assert values.min() > 0.3
    assert values.max() < 1.4


def test_equals_fp64_formula() -> None:
    """An update written independently, in fp64, within what five iterations in bf16 lose."""
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(24, 16, generator=generator)
    param, expected = nn.Parameter(start.clone()), start.double()
    optimizer = ShardedMuon([param], lr=0.1, weight_decay=0.5, adjust_lr_fn="match_rms_adamw")
    momentum = torch.zeros(24, 16, dtype=torch.float64)
    for _ in range(3):
        grad = torch.randn(24, 16, generator=generator)
        param.grad = grad
        optimizer.step()
        momentum = 0.95 * momentum + 0.05 * grad.double()
        u = 0.05 * grad.double() + 0.95 * momentum
        x = (u / torch.linalg.matrix_norm(u)).T
        a, b, c = NS_COEFFICIENTS
        for _ in range(5):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * 0.2 * 24**0.5 * x.T
    error = torch.linalg.matrix_norm(param.double() - expected)
    moved = torch.linalg.matrix_norm(expected - start.double())
    assert error < 0.02 * moved


def test_split_updates_each_matrix_on_its_own() -> None:
    """A fused query, key and value, and stacked experts, as their parts alone."""
    generator = torch.Generator().manual_seed(3)
    parts = torch.randn(3, 8, 6, generator=generator)
    grads = torch.randn(3, 8, 6, generator=generator)
    fused, stacked = nn.Parameter(parts.reshape(24, 6).clone()), nn.Parameter(parts.clone())
    alone = [nn.Parameter(part.clone()) for part in parts]
    groups = [{"params": [fused, stacked], "split": 3, "use_muon": True}, {"params": alone}]
    optimizer = ShardedMuon(groups, lr=0.1)
    fused.grad, stacked.grad = grads.reshape(24, 6).clone(), grads.clone()
    for param, grad in zip(alone, grads, strict=True):
        param.grad = grad.clone()
    optimizer.step()
    expected = torch.stack(tuple(alone))
    assert torch.equal(stacked, expected)
    assert torch.equal(fused, expected.view(24, 6))


def test_transposed_storage_is_that_of_torch() -> None:
    """A matrix whose columns are adjacent in memory."""
    start = torch.randn(6, 10, generator=torch.Generator().manual_seed(4))
    grad = torch.randn(6, 10, generator=torch.Generator().manual_seed(5))
    own, theirs = (nn.Parameter(start.T.contiguous().T) for _ in range(2))
    optimizers = ShardedMuon([own, ones(6, 10)], lr=0.1), torch.optim.Muon([theirs], lr=0.1)
    own.grad, theirs.grad = grad.clone(), grad.clone()
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(own, theirs)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 50, bias=False)


def kinds(optimizer: ShardedMuon) -> dict[bool, list[str]]:
    return {group["use_muon"]: group["param_names"] for group in optimizer.param_groups}


def test_a_model_gives_embeddings_and_heads_to_adamw(recwarn: pytest.WarningsRecorder) -> None:
    """Only matrices of hidden layers follow Muon; options of AdamW's groups are set apart."""
    optimizer = ShardedMuon(Net(), lr=0.02, adamw={"lr": 3e-4, "betas": (0.9, 0.95)})
    assert kinds(optimizer) == {
        True: ["hidden.weight"],
        False: ["tokens.weight", "hidden.bias", "head.weight"],
    }
    muon, adamw = optimizer.param_groups
    assert (muon["lr"], muon["eps"]) == (0.02, 1e-7)
    assert (adamw["lr"], adamw["betas"], adamw["eps"]) == (3e-4, (0.9, 0.95), 1e-8)
    assert not recwarn.list


def test_hidden_layers_of_the_shape_of_a_table_stay_hidden() -> None:
    """Position tables of as many rows as columns, as square projections; heads of another width."""
    net = nn.ModuleDict(
        {
            "positions": nn.Embedding(8, 8),
            "tokens": nn.Embedding(50, 8),
            "q": nn.Linear(8, 8, bias=False),
            "o": nn.Linear(8, 8, bias=False),
            "up": nn.Linear(8, 50, bias=False),
            "up2": nn.Linear(8, 50, bias=False),
        }
    )
    optimizer = ShardedMuon(net)
    assert kinds(optimizer)[True] == ["q.weight", "o.weight", "up.weight", "up2.weight"]
    tied = Net()
    tied.head.weight = tied.tokens.weight
    assert kinds(ShardedMuon(tied))[True] == ["hidden.weight"]


def test_names_of_embeddings_are_warned_of() -> None:
    """A list of parameters does not tell which matrix is an embedding; names may."""
    named = [("wte.weight", ones(50, 8)), ("hidden.weight", ones(8, 8))]
    with pytest.warns(UserWarning, match=r"orthogonalises the updates of wte\.weight\."):
        ShardedMuon(named)


def test_groups_tell_their_kind() -> None:
    """As MuonWithAuxAdam's users write them; others are divided."""
    groups = [
        {"params": [ones(4, 4)], "use_muon": True, "lr": 0.02},
        {"params": [ones(4, 4), ones(4)], "use_muon": False, "lr": 3e-4, "eps": 1e-10},
        {"params": [ones(4), ones(3, 3)]},
    ]
    optimizer = ShardedMuon(groups)
    found = [(g["use_muon"], [tuple(p.shape) for p in g["params"]]) for g in optimizer.param_groups]
    assert found == [
        (True, [(4, 4)]),
        (False, [(4, 4), (4,)]),
        (True, [(3, 3)]),
        (False, [(4,)]),
    ]
    assert optimizer.param_groups[1]["eps"] == 1e-10
    optimizer.add_param_group({"params": [ones(2, 2)]})
    optimizer.add_param_group({"params": [ones(2)]})
    assert [g["use_muon"] for g in optimizer.param_groups[4:]] == [True, False]
    with pytest.raises(ValueError, match="has matrices and other parameters"):
        optimizer.add_param_group({"params": [ones(2), ones(2, 2)]})


def test_the_default_split_counts_in_division() -> None:
    """Stacked experts follow Muon, and vectors AdamW, whether the group or the class has split."""
    experts, bias = ones(4, 8, 6), ones(6)
    for optimizer in (
        ShardedMuon([experts, bias], split=4),
        ShardedMuon([{"params": [experts, bias], "split": 4}]),
    ):
        found = [
            (g["use_muon"], [tuple(p.shape) for p in g["params"]]) for g in optimizer.param_groups
        ]
        assert found == [(True, [(4, 8, 6)]), (False, [(6,)])]
        optimizer.add_param_group({"params": [ones(4, 2, 2)], "split": 4})
        assert optimizer.param_groups[-1]["use_muon"]


def test_sets_are_refused_and_empty_groups_kept() -> None:
    """A set has another order on each rank; the number of groups is the caller's."""
    with pytest.raises(TypeError, match="ordered collections"):
        ShardedMuon([{"params": {ones(2, 2), ones(3, 3)}}])
    optimizer = ShardedMuon([{"params": []}, {"params": [ones(2, 2)]}])
    optimizer.add_param_group({"params": []})
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 1, 0]


def marked(*shape: int) -> nn.Parameter:
    param = ones(*shape)
    param.use_muon = True  # type: ignore[attr-defined]
    return param


BAD: list[tuple[Any, dict[str, Any], str]] = [
    ([{"params": [ones(3)], "use_muon": True}], {}, r"param_groups\[0\]\[0\] \(3,\).*use_muon"),
    ([ones(2, 2), marked(4, 3, 2, 2)], {}, r"\[1\] \(4, 3, 2, 2\).*\"use_muon\": False"),
    ([marked(3)], {}, r"\(3,\).*\"use_muon\": False"),
    ([{"params": [ones(2, 3, 3)], "use_muon": True}], {}, r'own with "split": 2'),
    ([{"params": [ones(4, 3)], "split": 3, "use_muon": True}], {}, "no multiple of split"),
    ([ones(2, 2)], {"momentum": 1.5}, "Invalid momentum value: 1.5"),
    ([ones(2, 2)], {"ns_steps": 100}, "Invalid ns_steps: 100"),
    ([ones(2, 2)], {"ns_coefficients": (1.0, 2.0)}, "Give three numbers"),
    ([ones(2, 2)], {"adjust_lr_fn": "spectral"}, "Invalid adjust_lr_fn: 'spectral'"),
    ([ones(2, 2)], {"split": 0}, "Invalid split: 0"),
    ([ones(2, 2)], {"lr": -1.0}, "Invalid learning rate: -1.0"),
    ([ones(2)], {"adamw": {"betas": (2.0, 0.9)}}, "Invalid beta parameter at index 0: 2.0"),
    ([ones(2)], {"adamw": {"beta": (0.9, 0.9)}}, "AdamW has no beta"),
]


@pytest.mark.parametrize(("params", "options", "text"), BAD, ids=[text for _, _, text in BAD])
def test_bad_input_is_named(params: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ShardedMuon(params, **options)


def test_states_of_the_other_kind_are_refused() -> None:
    """A state dict whose groups follow the other rule."""
    param = ones(3, 3)
    adamw = ShardedMuon([{"params": [param], "use_muon": False}])
    param.grad = torch.ones(3, 3)
    adamw.step()
    muon = ShardedMuon([{"params": [ones(3, 3)], "use_muon": True}])
    with pytest.raises(ValueError, match="use_muon=False in group 0, the optimizer True"):
        muon.load_state_dict(adamw.state_dict())
    muon.param_groups[0]["use_muon"] = False
    with pytest.raises(ValueError, match="use_muon or split of a parameter group has changed"):
        muon.step()


# Owners


class OneOf(SingleRank):
    """A rank of several that do not exist: nothing is sent."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size


def bert_large() -> Iterator[ParamSpec]:
    shapes = [(1024, 1024)] * 4 + [(4096, 1024), (1024, 4096)]
    for layer in range(24):
        for index, shape in enumerate(shapes):
            stride = dense_stride(shape, (shape[1], 1))
            policy = f"1*{shape[0]}x{shape[1]}"
            name = f"{layer}.{index}"
            yield ParamSpec(name, shape, stride, "float32", "cpu", 0, policy, storage="muon")


class Shards:
    """What MatrixExchange asks a provider for, of a layout without storage."""

    device = torch.device("cpu")

    def __init__(self, layout: FlatLayout) -> None:
        self.layout = layout
        kinds = dict.fromkeys(spec.policy for spec in layout.specs)
        group = {"use_muon": True}
        self.param_sets = [_Set(number, group, policy) for number, policy in enumerate(kinds)]

    def params(self, number: int) -> list[tuple[int, ParamSpec]]:
        policy = self.param_sets[number].policy
        return [(i, spec) for i, spec in enumerate(self.layout.specs) if spec.policy == policy]

    def parts_of(self, rank: int, params: Any) -> list[Fragment]:
        flats = self.layout.flats
        return [f for flat in flats for f in self.layout.fragments(flat, rank) if f.param in params]


class _Set:
    def __init__(self, number: int, group: dict[str, Any], policy: str) -> None:
        self.number, self.group, self.policy = number, group, policy


def test_bert_large_is_balanced_over_eight_ranks() -> None:
    """No rank computes more than 1.15 of an eighth; every matrix has one owner."""
    layout = FlatLayout.build(list(bert_large()), world_size=8, granularity="tensor")
    comms: list[Any] = [OneOf(rank, 8) for rank in range(8)]
    shards: Any = Shards(layout)
    exchanges = [MatrixExchange(MuonRule(), shards, comm) for comm in comms]
    costs = [exchanges[0].cost_of(rank) for rank in range(8)]
    assert max(costs) <= 1.15 * sum(costs) / 8
    # 302 M elements of bf16, so 75 MB a rank: one round.
    assert [exchange.num_rounds for exchange in exchanges] == [1] * 8


def test_padding_moves_nothing() -> None:
    """OwnShards tells the parts that a rank has; padding belongs to none."""
    params = [ones(5, 3), ones(7, 2)]
    optimizer = ShardedMuon(params)
    shards = optimizer._shards
    assert isinstance(shards, OwnShards)
    parts = shards.parts_of(0, {0, 1})
    assert {(f.param, f.param_start, f.numel) for f in parts} == {(0, 0, 15), (1, 0, 14)}


def test_lr_may_be_a_tensor() -> None:
    """A tensor of one element counts as its number."""
    params, others = ones(4, 4), ones(4, 4)
    first, second = ShardedMuon([params], lr=torch.tensor(0.1)), ShardedMuon([others], lr=0.1)  # type: ignore[arg-type]
    grad: Tensor = torch.arange(16.0).view(4, 4)
    for param, optimizer in ((params, first), (others, second)):
        param.grad = grad.clone()
        optimizer.step()
    assert torch.allclose(params, others, rtol=1e-6)
