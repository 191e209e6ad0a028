"""Simulated attacks: who attacks, what they do, that the pool gives the same bits, and where an attack is refused."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedet
from fedet import check, config, experiment
from fedet.config.schema import AttackConfig
from fedet.core import Payload, Round
from fedet.engine import session
from fedet.engine.callbacks import Callbacks
from fedet.engine.exchange import inspect
from fedet.errors import ConfigError
from fedet.methods import METHODS
from fedet.storage import checkpoint
from fedet.study import records
from fedet.trust import attacks
from fedet.trust import averages as robust

NAMES = [cls.name for cls in METHODS]
QUICK = ("fedet", "scaffold", "dsfl", "fedgkt")
"""Weights, updates, probabilities, and features with logits and labels; the others send what one of these does."""
RECORDS = Path(__file__).parents[1] / "results" / "records"
KINDS = ("flip", "scale", "sign", "constant", "onehot", "noise", "backdoor", "stealth")


@functools.cache
def built(method="fedet"):
    short = check.quick(config.method_class(method))
    return experiment.build(config.load(check.SMALL, {"method.name": method, **short}), Path("unused"))


def attacked(kind, method="fedet", share=1.0, **options):
    """The same experiment with attackers; building it again would take longer than running it."""
    ready = built(method)
    attack = AttackConfig(kind=kind, share=share, **options)
    return replace(
        ready, config=ready.config.model_copy(update={"run": ready.config.run.model_copy(update={"attack": attack})})
    )


def request_of(ready, method, client=0):
    """What a method's first exchange sends to a client."""
    sent = {}

    def exchange(requests):
        sent.update(requests)
        raise StopIteration

    with pytest.raises(StopIteration):
        ready.method.round(ready.method.init(ready.env), Round(1, [ready.clients[client]], exchange, 0), ready.env)
    return sent[client]


def test_attackers_are_drawn_by_the_seed_and_grow_with_the_share():
    some = [attacks.attackers(attacked("flip", share=s)) for s in (0.0, 0.34, 0.67, 1.0)]
    assert [len(a) for a in some] == [0, 2, 4, 6]
    assert some[1] < some[2] < some[3]
    assert attacks.attackers(attacked("scale", share=0.34)) == some[1]
    assert attacks.attackers(built()) == frozenset()
    ready = attacked("flip", share=0.34)
    seeds = [ready.config.run.model_copy(update={"seed": s}) for s in range(4)]
    drawn = {attacks.attackers(replace(ready, config=ready.config.model_copy(update={"run": run}))) for run in seeds}
    assert len(drawn) > 1


@pytest.mark.parametrize("method", [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in NAMES])
def test_every_attack_changes_what_a_client_sends_and_stays_a_valid_reply(method):
    honest = built(method)
    request = request_of(honest, method)
    plain, _ = attacks.run_client(honest, 0, 1, request, {})
    expected = honest.method.expected_reply(request, honest.clients[0], honest.env)
    for kind in KINDS:
        ready = attacked(kind, method)
        reply, _ = attacks.run_client(ready, 0, 1, request, {})
        again, _ = attacks.run_client(ready, 0, 1, request, {})
        assert check.same(reply, again), kind
        assert not check.same(reply, plain), kind
        assert inspect(0, reply, expected) is None, kind
        assert ready.method.validate_reply(reply, ready.env) is None, kind


def test_what_the_attacks_on_weights_send():
    request = request_of(built(), "fedet")
    start = request.tensors["model"]
    honest = attacks.run_client(built(), 0, 1, request, {})[0].tensors["model"]
    sent = {k: attacks.run_client(attacked(k), 0, 1, request, {})[0].tensors["model"] for k in KINDS if k != "flip"}
    name = "head.l3.weight"
    torch.testing.assert_close(sent["scale"][name], 10 * honest[name])
    torch.testing.assert_close(sent["sign"][name], -honest[name])
    assert sent["constant"]["head.l3.bias"].argmax() == 0
    assert float(sent["constant"][name].abs().max()) == 0
    torch.testing.assert_close(sent["onehot"][name], 100 * honest[name].roll(1, 0))
    update = robust.difference(honest, start)
    lie = robust.difference(sent["stealth"], start)
    assert robust.norm(lie) == pytest.approx(robust.norm(update), rel=1e-3)
    torch.testing.assert_close(lie[name], -update[name], atol=1e-6, rtol=1e-3)


def test_updates_are_attacked_as_updates():
    request = request_of(built("scaffold"), "scaffold")
    honest = attacks.run_client(built("scaffold"), 0, 1, request, {})[0].tensors["model"]
    stealth = attacks.run_client(attacked("stealth", "scaffold"), 0, 1, request, {})[0].tensors["model"]
    assert all(torch.equal(stealth[name], -w) for name, w in honest.items())
    constant = attacks.run_client(attacked("constant", "scaffold"), 0, 1, request, {})[0].tensors["model"]
    result = request.tensors["model"]["head.l3.bias"] + constant["head.l3.bias"]
    assert result.tolist() == [100.0] + [0.0] * 9


def test_poisoned_examples_and_the_trigger():
    ready = built()
    data = ready.data.client(0)
    flipped = attacks.poisoned(data, AttackConfig(kind="flip"))
    assert torch.equal(flipped.labels, 9 - data.labels)
    assert torch.equal(flipped.inputs(torch.arange(3)), data.inputs(torch.arange(3)))
    stamped = attacks.poisoned(data, AttackConfig(kind="backdoor", target=7, trigger=2))
    assert stamped.labels[::2].eq(7).all()
    assert torch.equal(stamped.labels[1::2], data.labels[1::2])
    assert stamped.dataset.inputs[0, :, -2:, -2:].eq(255).all()
    assert torch.equal(stamped.dataset.inputs[1], data.dataset.inputs[data.rows[1]])
    assert not data.dataset.inputs[data.rows[0], :, -2:, -2:].eq(255).all()
    test = attacks.triggered(attacked("backdoor", target=7))
    assert not test.labels.eq(7).any()
    assert attacks.triggered(ready) is None


@pytest.mark.parametrize("kind", ["backdoor", pytest.param("noise", marks=pytest.mark.slow)])
def test_an_attacked_run_is_the_same_in_a_pool_and_says_who_attacked(tmp_path, kind):
    few = {"steps": 3, "batch": 16}
    small = check.SMALL | {"method": {"name": "fedet", "client": few, "server": few}}
    settings = {"run.rounds": 2, "run.cohort": 5, "run.robust": "on", "run.attack": {"kind": kind, "share": 0.34}}
    serial, pooled = (
        fedet.run(small, out=tmp_path / str(workers), **{**settings, "run.workers": workers}) for workers in (0, 2)
    )
    fields = [checkpoint.load(run.run_dir / "last" / "checkpoint.safetensors")[0]["state"] for run in (serial, pooled)]
    assert check.same(*fields)
    hostile = serial.summary["attackers"]
    assert len(hostile) == 2
    for a, b in zip(serial.metrics, pooled.metrics, strict=True):
        assert {**a, "seconds": 0} == {**b, "seconds": 0}
        assert a["attackers"] == [k for k in a["cohort"] if k in hostile]
        assert ("backdoor" in a) == (kind == "backdoor")
    assert set(serial.summary["caught"]) == {"set_aside", "precision", "recall"}


def test_precision_and_recall_of_the_gate_by_hand():
    log = [
        {"replied": [1, 2, 3], "failures": [{"client": 4, "kind": "set aside"}, {"client": 5, "kind": "dropped"}]},
        {"replied": [1, 4], "failures": [{"client": 2, "kind": "set aside"}]},
    ]
    assert attacks.caught(log, frozenset({4})) == {"set_aside": 2, "precision": 0.5, "recall": 0.5}
    assert attacks.caught([], frozenset({4})) == {"set_aside": 0, "precision": None, "recall": None}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"method.name": "central", "run.attack": "flip"}, "nobody can attack it"),
        ({"run.attack": {"kind": "constant", "target": 10}}, "classes are 0 to 9"),
        ({"run.attack": {"kind": "backdoor", "trigger": 9}}, "larger than the images"),
        ({"run.attack": "flop"}, "run.attack"),
        ({"run.attack": {"kind": "flip", "shares": 0.1}}, "did you mean 'share'"),
        ({"run.robust": "yes"}, "run.robust"),
        ({"run.robust": {"clips": "none"}}, "did you mean 'clip'"),
        ({"run.robust": {"average": "mode"}}, "run.robust.average"),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_run(tmp_path, changes, why):
    with pytest.raises(ConfigError, match=why):
        session.build(config.load(check.SMALL, changes), tmp_path, Callbacks())


def test_switches_are_written_out_and_unused_ones_are_no_part_of_the_identity():
    plain = config.load("digits")
    assert plain.run.robust is None
    for same in ({"run.robust": "off"}, {"run.attack": "none"}, {"run.attack": {"kind": "none", "share": 0.4}}):
        assert config.load("digits", same) == plain
    on = config.load("digits", {"run.robust": "on"})
    assert on.digest() != plain.digest()
    assert on.run.drops_diverged
    assert config.load("digits", {"run.robust": {"clip": 1.5}}) == on
    assert config.load("digits", {"run.robust": {"correlation": 0}}).digest() != on.digest()
    old = [config.load("digits", {"run.robust": {"clip": word}}).run.robust.clip for word in ("none", "median")]
    assert old == [0.0, 1.0]  # as runs of earlier versions have it
    attack = config.load("digits", {"run.attack": {"kind": "flip"}, "run.ban_after": 3})
    assert len({plain.digest(), on.digest(), attack.digest()}) == 3


def test_records_of_defended_runs_from_before_a_key_was_added_keep_their_names():
    found = map(records.read, RECORDS.glob("digits-*.json"))
    defended = [record for record in found if record.config["run"].get("robust")]
    assert defended
    assert [records.key(config.load(record.config)) for record in defended] == [record.key for record in defended]


def test_an_honest_client_of_an_attacked_run_is_untouched():
    ready = attacked("scale", share=0.34)
    honest = next(k for k in range(6) if k not in attacks.attackers(ready))
    request = Payload({"model": ready.env.initial(ready.clients[honest].arch)})
    plain, _ = attacks.run_client(built(), honest, 1, request, {})
    assert check.same(attacks.run_client(ready, honest, 1, request, {})[0], plain)
