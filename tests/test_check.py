"""`fedet check` finds a broken method: for each promise there is one that breaks it, and the method around it is sound."""

import pytest

from fedet import check, config
from fedet.errors import ConfigError

SOUND = """
import copy
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedet import maths, train
from fedet.core import Method, Payload, Weights, weights_of
from fedet.train import Training

SHARED = {}


@dataclass(frozen=True)
class Sound(Method[Weights]):
    name: ClassVar[str] = "sound"
    client: Training = Training(lr=0.1, batch=16, steps=6)

    def init(self, env):
        return env.initial(env.large)

    def round(self, state, r, env):
        ups = r.exchange({c.id: Payload({"model": state}) for c in r.cohort})
        return maths.average([up.tensors["model"] for up in ups.values()], r.weights(ups))

    def local(self, down, client):
        model = client.build(client.large, down.tensors["model"])
        train.fit(model, client.data, self.client, seed=client.seed)
        return Payload({"model": weights_of(model)})

    def models(self, state, env):
        return {"server": (env.large, state)}


@dataclass(frozen=True)
class Broken(Sound):
"""
BROKEN = {
    "determinism": """
    def local(self, down, client):  # random numbers of the whole process
        model = super(Broken, self).local(down, client).tensors["model"]
        return Payload({"model": {k: v + 0.01 * torch.rand(1) for k, v in model.items()}})
""",
    "learns": """
    def round(self, state, r, env):  # asks, and does nothing with the answers
        r.exchange({c.id: Payload({"model": state}) for c in r.cohort})
        return dict(state)
""",
    "resume": """
    def round(self, state, r, env):  # something that is not in the state decides
        SHARED["rounds"] = SHARED.get("rounds", 0) + 1 if r.number > 1 else 1
        new = super(Broken, self).round(state, r, env)
        SHARED["init"] = SHARED.get("init", 0)
        return {k: v * (1 + 0.01 * SHARED["init"]) if v.is_floating_point() else v for k, v in new.items()}

    def init(self, env):
        SHARED["init"] = SHARED.get("init", 0) + 1
        return super(Broken, self).init(env)
""",
    "parity": """
    def local(self, down, client):  # what one client learns, the server reads without a message
        reply = super(Broken, self).local(down, client)
        SHARED[client.round, client.id] = 1
        return reply

    def init(self, env):
        SHARED.clear()
        return super(Broken, self).init(env)

    def round(self, state, r, env):
        new = super(Broken, self).round(state, r, env)
        seen = sum((r.number, c.id) in SHARED for c in r.cohort)
        return {k: v + 0.001 * seen if v.is_floating_point() else v for k, v in new.items()}
""",
    "arrival": """
    def local(self, down, client):  # each client starts from what the one before it has made
        if SHARED.get("round") != client.round:
            SHARED.update(round=client.round, model=None)
        start = SHARED["model"] or down.tensors["model"]
        reply = super(Broken, self).local(Payload({"model": start}), client)
        SHARED["model"] = copy.deepcopy(reply.tensors["model"])
        return reply
""",
    "drop-out": """
    def round(self, state, r, env):  # takes it for granted that everybody answers
        ups = r.exchange({c.id: Payload({"model": state}) for c in r.cohort})
        return maths.average([ups[c.id].tensors["model"] for c in r.cohort])
""",
    "silence": """
    def round(self, state, r, env):  # goes on without answers
        try:
            return super(Broken, self).round(state, r, env)
        except Exception:
            return {k: v + 1 if v.is_floating_point() else v for k, v in state.items()}
""",
    "ledger": """
    def local(self, down, client):  # a model in a text
        reply = super(Broken, self).local(down, client)
        return Payload(reply.tensors, {"model": repr([t.flatten()[:50].tolist() for t in reply.tensors["model"].values()])})

    def expected_reply(self, down, client, env):
        return Payload(down.tensors, {"model": ""})
""",
    "aliasing": """
    def round(self, state, r, env):  # keeps the very tensors of a message
        ups = r.exchange({c.id: Payload({"model": state}) for c in r.cohort})
        return next(iter(ups.values())).tensors["model"]
""",
    "locality": """
    def local(self, down, client):  # the labels of those who worked before
        reply = super(Broken, self).local(down, client)
        before = SHARED.get("labels", 0.0)
        SHARED["labels"] = float(client.data.labels.sum())
        model = reply.tensors["model"]
        return Payload({"model": {k: v + 1e-4 * before if v.is_floating_point() else v for k, v in model.items()}})
""",
}


def outcomes(tmp_path, code, name="Broken"):
    (tmp_path / "broken.py").write_text(code, encoding="utf-8")
    return {o.name: o for o in check.check(f"{tmp_path / 'broken.py'}:{name}")}


def test_there_is_a_broken_method_for_every_check():
    assert [promise.__name__.replace("_", "-") for promise in check.CHECKS] == list(BROKEN)


def test_the_method_that_is_broken_below_is_sound(tmp_path):
    found = outcomes(tmp_path, SOUND + "    pass\n", "Sound")
    assert [o for o in found.values() if not o.ok] == []


@pytest.mark.parametrize("promise", BROKEN)
def test_a_method_that_breaks_a_promise_is_found(tmp_path, promise):
    (tmp_path / "broken.py").write_text(SOUND + BROKEN[promise], encoding="utf-8")
    lab = check.Lab(f"{tmp_path / 'broken.py'}:Broken", {}, tmp_path)
    wanted = next(p for p in check.CHECKS if p.__name__.replace("_", "-") == promise)
    found = next(o for o in check.run_checks(lab, [wanted]))
    assert not found.ok, found


def test_a_method_that_never_trains_is_not_approved(tmp_path):
    never = """
    def local(self, down, client):
        return Payload({"model": {k: v.double() for k, v in down.tensors["model"].items()}})
"""
    (tmp_path / "never.py").write_text(SOUND + never, encoding="utf-8")
    lab = check.Lab(f"{tmp_path / 'never.py'}:Broken", {}, tmp_path)
    (found,) = check.run_checks(lab, [check.learns])
    assert not found.ok
    assert "round 1 was lost" in found.detail


@pytest.mark.parametrize("hook", ["validate_replies", "complaint", "expected_replies", "client_model"])
def test_a_misspelt_hook_is_an_error(tmp_path, hook):
    code = (
        SOUND
        + f"""
    def {hook}(self, reply, env):
        return None
"""
    )
    (tmp_path / "misspelt.py").write_text(code, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"Broken\.{hook} is not a hook of Method"):
        config.method_class(f"{tmp_path / 'misspelt.py'}:Broken")


def test_a_method_that_is_no_method_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "plain.py").write_text(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Plain:\n    pass\n", encoding="utf-8"
    )
    with pytest.raises(ConfigError, match=r"subclass of fedet\.Method"):
        config.method_class(f"{tmp_path / 'plain.py'}:Plain")
