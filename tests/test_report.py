"""Reports are made from the folder alone, say what happened, load nothing from elsewhere, and repeat byte for byte."""

import contextlib
import csv
import itertools
import json
import random
import re
import statistics
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.text import Text

from fedet.errors import FedetError
from fedet.methods import METHODS
from fedet.reporting import comparisons, figure_files, plots, report, results, words
from fedet.reporting.run_data import RunData, read_run

CONFIG = """
name = "tiny"

[data]
name = "digits"
clients = 6
partition = "dirichlet"
alpha = 0.1

[models]
clients = ["cnn", "mlp"]
server = "vgg"

[method]
name = "{method}"
lam = {lam}

[run]
rounds = 4
cohort = 3
seed = {seed}
report_accuracy = [0.5, 0.9]
"""
SIZES = {"cnn": 1000, "mlp": 500, "vgg": 20000}
HOSTILE = "</td><script>alert('x')</script> & \"more\""
VOID = {"meta", "br", "img", "link", "hr", "input", "use"}


def make_run(
    folder: Path, method: str = "fedet", seed: int = 0, lam: float = 0.05, scores: tuple[float, ...] = (0.2, 0.55, 0.8, 0.7),
    finished: bool = True, failures: list[dict[str, Any]] | None = None,
) -> Path:  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.format(method=method, seed=seed, lam=lam), encoding="utf-8")
    env = {"fedet": "0.1.0", "torch": "2.13.0", "cpu": "Z80", "cores": 2, "command": f"fedet run tiny --seed {seed}"}
    env |= {"pid": 1, "rounds": 4}
    (folder / "env.json").write_text(json.dumps(env), encoding="utf-8")
    counts = np.random.default_rng(seed).integers(0, 9, (6, 3))
    np.savez(folder / "split.npz", label_counts=counts, sizes=counts.sum(1), archs=np.array(["cnn", "mlp"] * 3))
    rounds = [make_round(i, score, method == "fedet") for i, score in enumerate(scores, start=1)]
    rounds[1]["failures"] = failures or []
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rounds), encoding="utf-8")
    if finished:
        (folder / "result.json").write_text(json.dumps(make_result(method, seed, rounds)), encoding="utf-8")
    return folder


def make_round(number: int, score: float, ensemble: bool) -> dict[str, Any]:
    models = {"server": score, "cnn": score / 2, "mlp": score / 3, "consensus": score * 0.9} if ensemble else {"server": score}
    alpha = [[0.5, 0.2, 0.0], [0.25, 0.3, 0.0], [0.25, 0.5, 0.0]]
    notes = {"mass": 0.1, "confidence": {"clients": [0, 2, 5], "labels": [10, 30, 0], "alpha": alpha}} if ensemble else {}
    sent = 2500 if ensemble else 60000
    return {
        "round": number, "cohort": [0, 2, 5], "replied": [0, 2, 5], "lost": False, "failures": [],
        "params_up": sent, "params_down": sent, "bytes_up": 4 * sent, "bytes_down": 4 * sent,
        "model_params_up": sent, "model_params_down": sent, "params_total": 2 * sent * number,
        "accuracy": score, "loss": 1.0, "models": models, "notes": notes, "seconds": {"round": 1.5},
    }  # fmt: skip


def make_result(method: str, seed: int, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    best = max(rounds, key=lambda r: r["accuracy"])
    total = rounds[-1]["params_total"]
    cost = {f"{x:g}": next((r["params_total"] for r in rounds if r["accuracy"] >= x), None) for x in (0.5, 0.9)}
    return {
        "method": method, "data": "digits", "seed": seed, "rounds": len(rounds), "accuracy": rounds[-1]["accuracy"],
        "best_accuracy": best["accuracy"], "best_round": best["round"], "params_up": total // 2, "params_down": total // 2,
        "bytes_up": 2 * total, "bytes_down": 2 * total, "seconds": 6.0 + seed, "stopped": "rounds", "c_acc": cost,
        "arch_params": SIZES, "server": "vgg",
    }  # fmt: skip


class Balanced(HTMLParser):
    """Fails on a tag that closes another than the open one, or never; collects ids and what is referred to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for key, value in attrs if key == "id" and value]
        self.links += [value for key, value in attrs if key in ("href", "src", "xlink:href", "srcset", "action") and value]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"


def check_page(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    page = Balanced()
    page.feed(text)
    page.close()
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert not [link for link in page.links if re.match(r"(?i)\s*(\w+:)?//", link)]
    assert all(link[1:] in page.ids for link in page.links if link.startswith("#"))
    inner = set(re.findall(r"url\(([^)]*)\)", text))
    assert all(target.startswith("#") and target[1:] in page.ids for target in inner)
    assert '<div class="scroll"><' not in text, "a part that scrolls must be reached by keyboard"
    regions = re.findall(r'role="region" aria-label(?:ledby)?="([^"]*)"', text)
    assert len(regions) == len(set(regions))
    assert "@import" not in text
    assert "<script" not in text
    assert "http://" not in text
    assert "https://" not in text
    return text


def test_page_of_a_run_says_what_happened(tmp_path: Path) -> None:
    page = report.write_run(make_run(tmp_path / "a"))
    text = check_page(page)
    for piece in (
        "80.0%",
        "in round 3",
        "70.0%",
        "80.00%",
        "72.00%",
        "fedet run tiny --seed 0",
        "α = 0.1",
        "Z80",
        "lam = 0.05",
    ):
        assert piece in text, piece
    assert "20k</dd>" in text  # 4 rounds, 2500 each way
    assert "480k with vgg on the clients, 24.0 times as many" in text  # 4 rounds, 3 clients, both ways, 20000 parameters
    assert "50%: 10k; 90%: not reached" in text
    assert "not finished" not in text
    assert 'id="failures"' not in text
    names = {"accuracy_rounds", "accuracy_params", "distribution", "confidence"}
    assert {path.name for path in (page.parent / "plots").iterdir()} == {f"{n}.{e}" for n in names for e in ("png", "svg")}
    for path in (page.parent / "plots").glob("*.svg"):
        ET.parse(path)


def test_own_data_and_methods_are_named_without_the_machines_folders(tmp_path: Path) -> None:
    for number, (name, shown) in enumerate((("/tmp/x/cancer.py:data", "cancer.py:data"), ("object/1f:arrays", "arrays"))):
        folder = make_run(tmp_path / f"{number}", "/tmp/x/mine.py:Mine")
        toml = folder / "config.toml"
        toml.write_text(toml.read_text(encoding="utf-8").replace('"digits"', f'"{name}"'), encoding="utf-8")
        run = read_run(folder)
        assert words.title(run) == f"Mine on {shown}, seed 0"
        assert words.comparison_title([run, run]) == f"Comparison on {shown}"
        assert words.sentence(run).startswith("The method Mine trained vgg")
        told = words.sentence(run) + str(comparisons.conditions([run]))
        assert f"{shown}, Dirichlet split" in told
        assert "/" not in told
    assert words.title(read_run(make_run(tmp_path / "a"))) == "Fed-ET on digits, seed 0"
    assert words.proper("fedet-plus (lam=0.05)") == "Fed-ET+ (lam=0.05)"
    assert set(words.METHODS) == {method.name for method in METHODS}


def test_one_evaluation_is_a_table_and_no_curve(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    first, *_ = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "metrics.jsonl").write_text(first + "\n", encoding="utf-8")
    text = check_page(report.write_run(folder))
    assert not list((folder / "plots").glob("accuracy*"))
    assert "Final accuracy" in text
    assert "unless another round is given" in text
    assert "accuracy_rounds" not in text


def edited(folder: Path, number: int, **changes: Any) -> None:
    """Change the record of one round; None removes a key."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    lines[number - 1] = {key: value for key, value in (lines[number - 1] | changes).items() if value is not None}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_values_of_different_rounds_are_never_side_by_side_without_a_note(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    edited(folder, 4, models={"server": 0.7, "cnn": 0.35})  # as an older version did: the teachers in round 3 only
    rows = {row["name"]: row for row in results.model_rows(read_run(folder))}
    assert {name: row["final_round"] for name, row in rows.items()} == {"server": 4, "cnn": 4, "mlp": 3, "consensus": 3}
    assert [row["name"] for row in rows.values() if row["main"]] == ["server"]
    text = check_page(report.write_run(folder))
    assert '<td class="n">70.00%</td>' in text
    assert '<td class="n">35.00%</td>' in text
    assert '<td class="n">72.00% (round 3)</td><td class="n">72.00%</td>' in text  # the consensus
    assert '<td class="n">26.67% (round 3)</td>' in text
    assert results.comparison_rows([read_run(folder)])[0]["final_rounds"] == []


def test_a_last_round_that_was_not_evaluated_is_told(tmp_path: Path) -> None:
    one, two = (make_run(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    edited(two, 4, models=None, accuracy=None, loss=None)
    result = json.loads((two / "result.json").read_text(encoding="utf-8"))
    (two / "result.json").write_text(json.dumps(result | {"accuracy": 0.8}), encoding="utf-8")
    assert "in round 3; the last round was not evaluated" in check_page(report.write_run(two))
    rows = results.comparison_rows([read_run(one), read_run(two)])
    assert rows[0]["final_rounds"] == [3]
    assert results.table(rows)[1][0][2] == "75.00 ± 7.07 (round 3)"
    assert "75.00 ± 7.07 (round 3)" in check_page(report.write_comparison(tmp_path, [read_run(one), read_run(two)]))
    assert next(csv.DictReader(results.to_csv(rows).splitlines()))["final_rounds"] == "3"


def test_the_command_gives_this_run_also_after_it_was_made_longer(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    toml = (folder / "config.toml").read_text(encoding="utf-8")
    assert "<pre>fedet run tiny --seed 0</pre>" in check_page(report.write_run(folder))
    (folder / "config.toml").write_text(toml.replace("rounds = 4", "rounds = 9"), encoding="utf-8")
    text = check_page(report.write_run(folder))
    assert "<pre>fedet run config.toml</pre>" in text
    assert "<pre>fedet run tiny" not in text
    assert "<pre>fedet run a/config.toml</pre>" in check_page(report.write_comparison(tmp_path, [read_run(folder)]))
    env = json.loads((folder / "env.json").read_text(encoding="utf-8"))
    del env["rounds"]  # an older version did not write it down
    (folder / "env.json").write_text(json.dumps(env), encoding="utf-8")
    (folder / "config.toml").write_text(toml, encoding="utf-8")
    assert "<pre>fedet run config.toml</pre>" in check_page(report.write_run(folder))


def test_reports_run_no_code(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    (tmp_path / "evil.py").write_text(f"import os\nos.mkdir({str(proof)!r})\n", encoding="utf-8")
    folder, evil = make_run(tmp_path / "a"), f"{tmp_path / 'evil.py'}:Name"
    toml = (folder / "config.toml").read_text(encoding="utf-8")
    for name in ("digits", "vgg", "cnn", "fedet"):
        toml = toml.replace(f'"{name}"', f'"{evil}"')
    (folder / "config.toml").write_text(toml, encoding="utf-8")
    check_page(report.write_run(folder))
    check_page(report.write_comparison(tmp_path / "all", [read_run(folder)]))
    assert not proof.exists()


def test_files_of_any_content_end_in_a_page_or_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, rng = make_run(tmp_path / "a"), random.Random(0)
    junk = (None, True, -1, 1 << 70, 1e308, float("nan"), "x", [], [[]], {}, {"a": {}}, [1, "a"])
    before = {path: path.read_bytes() for path in good.iterdir()}
    for trial in range(250):
        monkeypatch.setenv("FEDET_PLOTS", "on" if trial % 50 == 0 else "off")  # they take long
        path = rng.choice([path for path in before if path.suffix in (".json", ".jsonl")])
        record = json.loads(before[path].splitlines()[0])
        place: Any = record
        while isinstance(place, dict) and rng.random() < 0.5 and any(isinstance(v, dict) for v in place.values()):
            place = rng.choice([v for v in place.values() if isinstance(v, dict)])
        if place:
            place[rng.choice(list(place))] = rng.choice(junk)
        path.write_text("\n".join([json.dumps(record), *before[path].decode().splitlines()[1:]]) + "\n", encoding="utf-8")
        with contextlib.suppress(FedetError):  # anything else is a traceback
            report.write_run(good)
            results.to_tex(results.comparison_rows([read_run(good)]))
        path.write_bytes(before[path])
    for table, key, value in ((t, k, v) for t in ("data", "models", "run", "method") for k in CONFIG_KEYS for v in TOML_JUNK):
        (good / "config.toml").write_text(f'{table} = {{ name = "x", {key} = {value} }}\n', encoding="utf-8")
        with contextlib.suppress(FedetError):
            report.write_run(good)


CONFIG_KEYS = ("clients", "partition", "alpha", "server", "rounds", "cohort", "seed", "report_accuracy", "label", "threads")
TOML_JUNK = ("true", "-1", "1e300", '"x"', "[]", "[[1]]", "{}", "1979-05-27", "nan")


def test_untrusted_text_is_escaped(tmp_path: Path) -> None:
    failures = [{"client": 2, "kind": "bad reply", "why": HOSTILE}, {"client": 5, "kind": "dropped", "why": ""}]
    folder = make_run(tmp_path / "a", failures=failures)
    hostile = {"server": 0.5, "_<script>$x^{": 0.4}
    lines = [json.loads(line) | {"models": hostile} for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    text = check_page(report.write_run(folder))
    assert "&lt;/td&gt;&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;" in text
    assert "1 bad reply, 1 dropped" in text


def test_attackers_the_success_of_a_back_door_and_bans_are_in_the_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    assert "attacked" not in check_page(report.write_run(folder))
    with (folder / "config.toml").open("a", encoding="utf-8") as file:
        file.write('attack = { kind = "backdoor" }\n')
    trust = {"attackers": [1, 4], "caught": {"set_aside": 4, "precision": 0.75, "recall": 0.5}, "backdoor": 0.125}
    result = json.loads((folder / "result.json").read_text()) | trust
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    lines = [json.loads(line) | {"banned": [4]} for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[2] |= {"lost": True, "why_lost": "the server's state left the finite numbers"}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    text = check_page(report.write_run(folder))
    assert "2 of 6 clients attacked (backdoor): 1, 4." in text
    assert "4 replies were set aside, of which 75% were attackers’: 50% of what these sent." in text
    assert "The back door works on 12.5% of the test images" in text
    assert "refused too often: 4." in text
    assert "1 round was lost, because the server&#39;s state left the finite numbers: 3." in text


def test_a_method_without_notes_or_small_models(tmp_path: Path) -> None:
    text = check_page(report.write_run(make_run(tmp_path / "a", method="fedavg")))
    assert "train that same model" in text
    assert "Who led" not in text
    assert "times as" not in text
    early = check_page(report.write_run(make_run(tmp_path / "b", method="fedavg", finished=False)))
    assert "keep it to themselves and train on it; 3 of them take part" in early


def test_a_run_that_goes_on_has_the_names_it_will_have_at_the_end(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", finished=False)
    wide = (
        (folder / "config.toml").read_text(encoding="utf-8").replace('server = "vgg"', 'server = {name = "vgg19", width = 0.5}')
    )
    (folder / "config.toml").write_text(wide, encoding="utf-8")
    assert "Fed-ET trains vgg19-w0.5 on the server" in check_page(report.write_run(folder))


def test_an_unfinished_run_with_a_torn_line(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", finished=False)
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"round": 5, "accuracy": 0.')
    text = check_page(report.write_run(folder))
    assert "This run is not finished." in text
    assert "first 4 of 4 rounds" in text
    assert "80.0%" in text
    run = read_run(folder)
    assert len(run.metrics) == 4
    assert results.summary(run)["seconds"] == 6.0
    assert results.summary(run)["c_acc"] == {"0.5": 10000, "0.9": None}


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG.format(method="fedet", seed=0, lam=0), encoding="utf-8")
    text = check_page(report.write_run(folder))
    assert "No round is complete yet." in text
    assert check_page(report.write_comparison(tmp_path, [read_run(folder)]))


def test_no_run_folder_and_damage_are_told(tmp_path: Path) -> None:
    with pytest.raises(FedetError, match="is not a run folder"):
        read_run(tmp_path)
    for name, content in (("metrics.jsonl", "{}\n{}\n"), ("result.json", "{"), ("split.npz", "PK"), ("config.toml", "a = [")):
        folder = make_run(tmp_path / name)
        (folder / name).write_text(content, encoding="utf-8")
        with pytest.raises(FedetError, match="damaged"):
            read_run(folder)
    with pytest.raises(FedetError, match="nothing to compare"):
        report.write_comparison(tmp_path, [])


def test_a_repeated_round_counts_once_and_the_best_is_chosen_by_validation(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", finished=False)
    again = make_round(4, 0.6, True) | {"val_accuracy": 0.95}
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(again) + "\n")
    found = results.summary(read_run(folder))
    assert (found["rounds"], found["best_round"], found["best_accuracy"]) == (4, 4, 0.6)


def test_leaders_are_weighted_by_the_labels_of_each_round(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        line["notes"] = {}
    other = {"clients": [5, 3], "labels": [30, 0, 0], "alpha": [[0.9, 0, 0], [0.1, 0, 0]]}
    lines[1]["notes"] = {"confidence": other}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    found = results.leaders(read_run(folder))
    assert found is not None
    matrix, clients, count = found
    assert clients == [5, 2, 0, 3]  # 44.5, 11.5, 11 and 3 labels' worth of weight
    assert list(count) == [40, 30, 0]
    assert matrix[0, 0] == pytest.approx((10 * 0.25 + 30 * 0.9) / 40)
    assert matrix[0, 1] == pytest.approx(0.5)
    assert np.isnan(matrix[:, 2]).all()


def compared(tmp_path: Path) -> list[RunData]:
    runs = [
        make_run(tmp_path / "fedet-s0", "fedet", 0, scores=(0.3, 0.6, 0.8, 0.8)),
        make_run(tmp_path / "fedet-s1", "fedet", 1, scores=(0.3, 0.4, 0.9, 0.7)),
        make_run(tmp_path / "fedavg-s0", "fedavg", 0, scores=(0.1, 0.2, 0.4, 0.3)),
    ]
    return [read_run(run) for run in runs]


def test_comparison_has_mean_and_sample_deviation(tmp_path: Path) -> None:
    fedet, fedavg = results.comparison_rows(compared(tmp_path))
    assert (fedet["label"], fedet["n"], fedet["seeds"]) == ("fedet", 2, [0, 1])
    assert fedet["best_accuracy"] == pytest.approx(0.85)
    assert fedet["best_accuracy_std"] == pytest.approx(0.1 / 2**0.5)
    assert fedet["final_accuracy"] == pytest.approx(0.75)
    assert fedet["final_accuracy_std"] == pytest.approx(statistics.stdev([0.8, 0.7]))
    assert (fedet["rounds"], fedet["params_total"], fedet["seconds"]) == (4, 20000, 6.5)
    assert (fedet["c_acc_0.5"], fedet["reached_0.5"]) == (12500, 2)  # 10000 in round 2, 15000 in round 3
    assert (fedet["c_acc_0.9"], fedet["reached_0.9"]) == (15000, 1)
    assert (fedavg["best_accuracy_std"], fedavg["c_acc_0.5"], fedavg["reached_0.5"]) == (None, None, 0)


def test_comparison_page_and_tables(tmp_path: Path) -> None:
    runs = compared(tmp_path)
    text = check_page(report.write_comparison(tmp_path, runs))
    assert "85.00 ± 7.07" in text
    assert "15k (1 of 2)" in text
    assert 'href="fedet-s1/report.html"' in text
    assert "runs with the same seed have in common: each client&#39;s examples" in text
    assert "Not equal" not in text
    assert '<td>server (vgg)</td><td class="n">20,000</td><td class="n">75.00</td><td class="n">85.00</td>' in text
    assert '<td></td><td>cnn</td><td class="n">1,000</td><td class="n">37.50</td>' in text
    rows = list(csv.DictReader((tmp_path / "table.csv").read_text(encoding="utf-8").splitlines()))
    assert [row["label"] for row in rows] == ["fedet", "fedavg"]
    assert float(rows[0]["best_accuracy_std"]) == pytest.approx(0.1 / 2**0.5)
    assert (rows[0]["seeds"], rows[1]["best_accuracy_std"], rows[1]["c_acc_0.5"]) == ("0 1", "", "")
    tex = (tmp_path / "table.tex").read_text(encoding="utf-8").splitlines()
    assert tex[1:3] == [r"\begin{tabular}{lrrrrrrrr}", r"\toprule"]
    assert tex[3].startswith(
        r"method & best accuracy, \% & final accuracy, \% & n & rounds & parameters sent & $C_{\text{acc}}$(50\%)"
    )
    assert tex[5] == r"fedet & 85.00 $\pm$ 7.07 & 75.00 $\pm$ 7.07 & 2 & 4 & 20k & 12.5k & 15k (1 of 2) & 6.5 \\"
    assert tex[6] == r"fedavg & 40.00 & 30.00 & 1 & 4 & 480k & not reached & not reached & 6.0 \\"


def with_references(tmp_path: Path) -> list[RunData]:
    """Fed-ET and FedAvg beside two references, one of which is better than both and one of which has no server model."""
    folders = [make_run(tmp_path / f"{name}-s0", name) for name in ("central", "fedet", "fedavg", "local")]
    for folder in (folders[0], folders[3]):
        rounds = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        for entry in rounds:
            entry |= dict.fromkeys(("params_up", "params_down", "bytes_up", "bytes_down", "params_total"), 0)
        result = make_result(folder.name, 0, rounds) | {"reference": True, "majority": 0.125, "c_acc": {}}
        result |= {"method": folder.name[:-3]}
        if folder.name == "local-s0":
            for entry in rounds[:-1]:
                del entry["accuracy"], entry["models"]
            spread = {"clients": 6, "mean": 0.3, "best": 0.5, "worst_tenth": 0.11, "weighted": 0.31}
            rounds[-1] |= {"accuracy": 0.3, "models": {"clients": 0.3}, "stored": {"clients": spread}}
            result |= {"server": None, "accuracy": 0.3, "best_accuracy": 0.3, "best_round": 4}
        else:
            rounds[-1] |= {"accuracy": 0.97, "models": {"server": 0.97}}
            result |= {"accuracy": 0.97, "best_accuracy": 0.97, "best_round": 4}
        (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rounds), encoding="utf-8")
        (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return [read_run(folder) for folder in folders]


def test_references_come_last_in_a_block_of_their_own_and_are_never_the_best(tmp_path: Path) -> None:
    runs = with_references(tmp_path)
    rows = results.comparison_rows(runs)
    assert [(row["label"], row["reference"]) for row in rows] == [
        *(("fedet", False), ("fedavg", False)),
        *(("central", True), ("local", True), ("majority", True)),
    ]
    text = check_page(report.write_comparison(tmp_path, runs, ["something was left out"]))
    methods, possible, *_ = re.findall(r"<tbody.*?</tbody>", text, flags=re.S)
    assert methods.count('class="main"') == 2  # both have the same accuracy
    assert "What was possible" in possible
    assert 'class="main"' not in possible
    assert re.search(r"<td>central</td><td class=\"n\">97.00</td>.*<td class=\"n\">–</td>", possible)
    assert "12.50" in possible
    assert "mean over 6 clients; weighted by examples 31.00%, the worst tenth 11.00%, the best 50.00%" in text
    assert "something was left out" in text
    tex = (tmp_path / "table.tex").read_text(encoding="utf-8").splitlines()
    assert tex[7:10] == [
        r"\midrule", r"\multicolumn{9}{l}{\emph{what was possible}} \\",
        r"central & 97.00 & 97.00 & 1 & 4 & -- & -- & -- & 6.0 \\",
    ]  # fmt: skip
    table = list(csv.DictReader((tmp_path / "table.csv").read_text(encoding="utf-8").splitlines()))
    assert [row["reference"] for row in table] == ["False", "False", "True", "True", "True"]


def test_references_are_lines_in_the_curves_and_no_bars_in_the_report(tmp_path: Path) -> None:
    runs = with_references(tmp_path)
    report.write_comparison(tmp_path, runs)
    for name in ("accuracy_rounds", "accuracy_params"):
        drawn = (tmp_path / "plots" / f"{name}.svg").read_text(encoding="utf-8")
        assert "central 97.0%" in drawn
        assert "local 30.0%" in drawn
    assert "central" not in (tmp_path / "plots" / "best.svg").read_text(encoding="utf-8")


def test_the_second_half_has_room_for_the_band_and_whole_percent() -> None:
    rounds, middle = list(range(1, 11)), [0.9] * 10
    curve = plots.Curve("fedet", rounds, middle, [0.7] * 10, [0.95] * 10)
    figure = plots.accuracy([curve], "round", late=True)
    low, high = figure.axes[1].get_ylim()
    assert low < 0.7 < 0.95 < high
    figure.draw_without_rendering()
    assert "80%" in {label.get_text() for label in figure.axes[1].get_yticklabels()}


@pytest.mark.parametrize("ys", [(0.986, 0.981, 0.975), (0.31, 0.305, 0.302, 0.1), (0.0, 0.001), (1.0, 1.0, 1.0)])
def test_labels_of_lines_in_a_report_do_not_overlap_or_leave_the_figure(ys: tuple[float, ...]) -> None:
    levels = [plots.Level(f"reference {i}", y) for i, y in enumerate(ys)]
    figure = plots.accuracy([plots.Curve("fedet", [1, 2], [0.1, 0.4])], "round", levels=levels)
    figure.draw_without_rendering()
    boxes = sorted((Text.get_window_extent(text) for text in figure.axes[0].texts), key=lambda box: box.y0)
    assert len(boxes) == len(ys)
    assert all(below.y1 <= above.y0 for below, above in itertools.pairwise(boxes))
    assert all(box.x1 <= figure.bbox.x1 and box.y0 >= 0 and box.y1 <= figure.bbox.y1 for box in boxes)


def test_the_report_of_a_reference_says_what_it_is(tmp_path: Path) -> None:
    central, *_, local = with_references(tmp_path)
    for run in (central, local):
        text = check_page(report.write_run(run.folder))
        assert "This is a reference, not a federated method" in text
        assert "accuracy_params" not in text
        assert "Parameters sent until an accuracy" not in text
        assert "gives 12.50%" in text
    assert "weighted by examples 31.00%, mean of the worst tenth 11.00%, best 50.00%" in text
    assert "mean over the clients" in text


def test_labels_name_what_differs(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(i), lam=lam, seed=seed) for i, (lam, seed) in enumerate([(0.05, 0), (0.2, 0), (0.2, 1)])]
    groups = results.grouped([read_run(run) for run in runs])
    assert {label: len(group) for label, group in groups.items()} == {"fedet (lam=0.05)": 1, "fedet (lam=0.2)": 2}
    assert r"fedet \_\&\{\}\textasciicircum{}" in results.to_tex(
        [results.comparison_rows(compared(tmp_path / "c"))[0] | {"label": "fedet _&{}^"}]
    )


def test_configurations_that_differ_in_much_go_by_their_names(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / name, seed=0)) for name in ("one", "two")]
    for run, width in zip(runs, (1.0, 2.0), strict=True):
        run.config["name"] = f"wide-{width:g}"
        run.config["models"] = {"server": {"width": width, "norm": f"{width}", "stem": f"{width}"}}
    assert list(results.grouped(runs)) == ["fedet (wide-1)", "fedet (wide-2)"]


def test_budgets_of_equal_traffic_do_not_split_a_group(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / str(i), seed=seed) for i, seed in enumerate([0, 1, 1])]
    for folder, budget in zip(folders, (100, 200, 300), strict=True):
        with (folder / "config.toml").open("a", encoding="utf-8") as file:
            file.write(f"budget_params = {budget}\n")
    runs = [read_run(folder) for folder in folders]
    assert {label: len(group) for label, group in results.grouped(runs[:2]).items()} == {"fedet": 2}
    assert list(results.grouped(runs)) == [f"fedet (run.budget_params={budget})" for budget in (100, 200, 300)]


def test_unequal_partitions_and_cohorts_are_told(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", "fedavg")
    counts = np.ones((6, 3), dtype=int)
    np.savez(b / "split.npz", label_counts=counts, sizes=counts.sum(1), archs=np.array(["cnn", "mlp"] * 3))
    text = check_page(report.write_comparison(tmp_path, [read_run(a), read_run(b)]))
    assert re.search(r"Not equal</strong>, or not recorded: each client&#39;s examples", text)


def test_the_same_folder_gives_the_same_bytes(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", failures=[{"client": 0, "kind": "diverged", "why": "nan"}])

    def written() -> dict[str, bytes]:
        report.write_run(folder)
        report.write_comparison(tmp_path / "all", [read_run(folder)])
        made = [*tmp_path.glob("**/plots/*"), *tmp_path.glob("**/report.html"), *tmp_path.glob("all/table.*")]
        return {str(path): path.read_bytes() for path in made}

    first = written()
    assert len(first) == 8 + 6 + 2 + 2
    assert written() == first
    assert not list(tmp_path.glob("**/*.tmp"))


def test_figures_of_a_report_come_in_two_widths_and_in_the_colours_of_the_page(tmp_path: Path) -> None:
    text = check_page(report.write_run(make_run(tmp_path / "a", scores=tuple(0.1 + 0.05 * i for i in range(12)))))
    assert text.count('<svg class="wide"') == text.count('<svg class="narrow"') == 4
    assert "second half" in text
    drawn = text[text.index("<svg") :]
    for colour in (plots.INK, plots.GREY, plots.FAINT, *plots.COLOURS[:2]):
        assert drawn.count(colour.lower()) == drawn.count(f", {colour.lower()})"), (
            colour
        )  # only as what a variable falls back to
    assert 'style="fill: #ffffff"' not in drawn
    kept = (tmp_path / "a" / "plots" / "accuracy_rounds.svg").read_text(encoding="utf-8")
    assert "var(" not in kept  # a file of its own has no style sheet


@pytest.mark.parametrize("width", [plots.WIDTH, plots.NARROW])
def test_the_second_half_in_a_report_has_a_scale_of_its_own(width: float) -> None:
    curve = plots.Curve("fedet", list(range(1, 21)), [0.1] * 10 + [0.9 + 0.001 * i for i in range(10)])
    figure = plots.accuracy([curve], levels=[plots.Level("majority", 0.1)], late=True, width=width)
    whole, late = figure.axes
    assert whole.get_ylim()[0] < 0.11
    assert late.get_ylim()[0] > 0.85
    assert len(late.lines) == 1  # the level is not in this range
    assert len(plots.accuracy([curve._replace(xs=[1, 2], ys=[0.1, 0.2])], late=True).axes) == 1


def test_weights_in_a_report_diverge_from_an_equal_share_and_name_architectures() -> None:
    figure = plots.confidence(np.array([[0.5, 0.25], [0.125, np.nan]]), [3, 1], range(2), 0.25, ["a", "b", "c", "d"])
    image, never = figure.axes[0].collections
    values = image.get_array()
    assert values.ravel().filled(9).tolist() == [1, 0, -1, 9]
    assert never.get_array().mask.tolist() == [[True, True], [True, False]]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["3  d", "1  b"]
    assert image.cmap(0.5)[3] < 0.1 < 0.5 < image.cmap(1.0)[3]


def test_the_report_of_a_comparison_begins_with_its_outcome_and_set_up(tmp_path: Path) -> None:
    runs = [
        read_run(make_run(tmp_path / f"{method}{seed}", method, seed, scores=(0.2, 0.5, 0.8 - lag + 0.01 * seed, 0.7)))
        for method, lag in (("fedet", 0.0), ("fedavg", 0.1)) for seed in range(3)
    ]  # fmt: skip
    text = check_page(report.write_comparison(tmp_path / "all", runs))
    assert "Fed-ET reached the best accuracy, 81.0% (mean over 3 seeds), before FedAvg with 71.0%" in text
    assert "The paired differences are clear of zero" in text
    assert "<td>fedet − fedavg</td>" in text
    assert "+10.00" in text
    assert "digits, Dirichlet split, α = 0.1" in text
    assert "vgg (20k parameters)" in text
    one = check_page(report.write_comparison(tmp_path / "two", [runs[0], runs[3]]))
    assert "one seed: no interval" in one


@pytest.mark.parametrize(
    ("lags", "words"),
    [
        ((0.01, 0.02, 0.3), "It was ahead with every seed, but 3 are too few for a 95% interval that is clear of zero."),
        ((0.1, 0.2, -0.1), "No paired difference is clear of zero: with other seeds the order may change."),
    ],
)
def test_the_outcome_says_how_sure_it_is(tmp_path: Path, lags: tuple[float, ...], words: str) -> None:
    runs = [
        read_run(make_run(tmp_path / f"{method}{seed}", method, seed, scores=(0.2, 0.6 - (method == "fedavg") * lag)))
        for method in ("fedet", "fedavg") for seed, lag in enumerate(lags)
    ]  # fmt: skip
    assert words in check_page(report.write_comparison(tmp_path / "all", runs))


def test_the_report_has_accuracy_by_class_and_client_if_the_metrics_do(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    assert "Accuracy by c" not in check_page(report.write_run(folder))
    spread = {"mean": 0.6, "worst_tenth": 0.31, "std": 0.1, "accuracies": {"4": 0.31, "5": 0.9}}
    edited(folder, 4, per_class=[0.5, 0.75, 1.0], confusion=[[3, 1, 0], [1, 3, 0], [0, 0, 4]], per_client=spread)
    text = check_page(report.write_run(folder))
    assert "75.0%" in text
    assert '<td class="d3">3</td><td class="h1">1</td>' in text
    assert "mean of the worst tenth 31.0%, the standard deviation 10.0 points. The lowest: client 4 31.0%" in text


@pytest.mark.parametrize(("clients", "labels"), [(1, 2), (10, 10), (100, 100), (250, 5)])
def test_distribution_of_any_size(clients: int, labels: int) -> None:
    counts = np.random.default_rng(0).integers(0, 40, (clients, labels))
    svg = figure_files.inline_svg(
        figure_files.svg(plots.distribution(counts, None if clients == 1 else ["a", "b"] * (clients // 2)))
    )
    assert ("the first 200 of 250 clients" in svg) == (clients > 200)
    assert len(svg) < 2_000_000


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (950, "950"), (431548, "432k"), (999_999, "1M"), (10e6, "10M"), (1.2e9, "1.2G"), (0.25, "0.25")],
)
def test_si(value: float, text: str) -> None:
    assert results.si(value) == text


def test_without_figures_the_report_says_how_to_draw_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDET_PLOTS", "off")
    folder = make_run(tmp_path / "a")
    page = report.write_run(folder).read_text(encoding="utf-8")
    assert "<svg" not in page
    assert "<code>fedet report</code> draws them" in page
    assert not (folder / "plots").exists()
    monkeypatch.setenv("FEDET_PLOTS", "on")
    assert "<svg" in report.write_run(folder).read_text(encoding="utf-8")


STYLE = (Path(report.__file__).parent / "templates" / "style.css").read_text(encoding="utf-8")
THEMES = [
    {name: both[theme] for name, *both in re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", STYLE)}
    for theme in (0, 1)
]
"""The colours of the style sheet by name, light and dark."""


def rgb(colour: str) -> list[float]:
    return [int(colour[k : k + 2], 16) for k in (1, 3, 5)]


def contrast(one: list[float], other: list[float]) -> float:
    """As WCAG defines it."""

    def luminance(colour: list[float]) -> float:
        linear = [v / 255 / 12.92 if v <= 10 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", THEMES, ids=["light", "dark"])
def test_numbers_on_a_heat_map_of_a_report_can_be_read(theme: dict[str, str]) -> None:
    """The contrast is 4.5 at least on the strongest shade of either colour, as WCAG asks of text."""
    shades = re.findall(r"\.h-?4.* color-mix\(in srgb, var\(--(c\d)\) (\d+)%", STYLE)
    assert [name for name, _ in shades] == ["c2", "c1"]
    for name, share in shades:
        for under in ("page", "card"):
            pairs = zip(rgb(theme[name]), rgb(theme[under]), strict=True)
            mixed = [int(share) / 100 * a + (1 - int(share) / 100) * b for a, b in pairs]
            assert contrast(mixed, rgb(theme["ink"])) >= 4.5, (name, under)


@pytest.mark.parametrize("theme", THEMES, ids=["light", "dark"])
def test_curves_and_words_of_a_report_stand_out(theme: dict[str, str]) -> None:
    """WCAG asks for 3 of what is drawn, which is on a card, and for 4.5 of text."""
    for number in range(1, len(plots.COLOURS) + 1):
        assert contrast(rgb(theme[f"c{number}"]), rgb(theme["card"])) >= 3, number
    for name in ("ink", "soft", "accent", "good", "bad"):
        assert min(contrast(rgb(theme[name]), rgb(theme[under])) for under in ("page", "card")) >= 4.5, name


def test_figures_of_a_report_as_files_have_the_colours_of_the_light_page() -> None:
    assert [THEMES[0][f"c{i}"].upper() for i in range(1, len(plots.COLOURS) + 1)] == [c.upper() for c in plots.COLOURS]
