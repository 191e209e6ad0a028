"""A round of Fed-ET at the paper's size and the same round in plain PyTorch, alternating, and fedet's peak memory.

python benchmarks/paper.py --data-dir DIR
python benchmarks/paper.py --data-dir DIR --stem imagenet                       # ResNets with torchvision's stem
python benchmarks/paper.py --data-dir DIR --rounds 1 --steps 3 --public 640     # to see that it works

Preset `cifar10-paper` as it is (a worker per core), the server's model tested after each round. Plain is one process with all
threads that works sequentially: contiguous tensors, `nn.Conv2d` throughout, `torch.optim.SGD`, images normalised in advance;
the same cohorts, examples, steps and layers. There, too, each teacher predicts the public images once a round.
"""

import argparse
import itertools
import json
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import plain
import torch
import torch.nn.functional as F
from common import Clock, Peak, hardware, table, write

import fedet
from fedet import Callbacks, config, experiment
from fedet.engine import rounds
from fedet.storage.run_folder import cache_folder

MODELS = {
    "cnn": lambda: plain.cnn(512, 128),
    "resnet8": lambda: plain.resnet18(blocks=1, stem="cifar"),
    "resnet18": lambda: plain.resnet18(stem="cifar"),
    "resnet8-imagenet": lambda: plain.resnet18(blocks=1),
    "resnet18-imagenet": lambda: plain.resnet18(),
    "vgg19": lambda: plain.vgg19(),
}


@cache
def build(changes, out):
    """The plain side's data and models, made once in its process."""
    built = experiment.build(config.load("cifar10-paper", json.loads(changes)), cache_folder(Path(out)))
    models = {name: MODELS[name]() for name in built.env.model_cache.names}
    sizes = {name: plain.size(model) for name, model in models.items()}
    assert sizes == {name: built.env.model_cache.num_params(name) for name in models}, sizes
    dataset = built.data.dataset
    parts = {part: dataset.batch(getattr(built.data, part).rows).contiguous() for part in ("test",)}
    public = built.env.public.view(1)
    parts["public"] = public.inputs(torch.arange(len(public))).contiguous()
    return built, models, parts


def prepare(changes, out):
    """Build before the clock starts; the result stays in the process."""
    build(changes, out)


def batches(size, batch, steps):
    """Shuffled passes without repeats."""
    passes = (torch.randperm(size).split(batch) for _ in itertools.count())
    return itertools.islice((index for order in passes for index in order if len(index) == min(batch, size)), steps)


@torch.inference_mode()
def predict(model, images):
    """Logits of all of them."""
    model.eval()
    return torch.cat([model(images[start : start + 250]) for start in range(0, len(images), 250)])


def one_round(number, changes, out):
    """Algorithm 1 as anyone writes it; wall and processor seconds."""
    built, models, parts = build(changes, out)
    method, clock, taught, heads = built.method, Clock(), [], []
    sent = {name: [] for name in built.env.archs}
    for client in rounds.select(built, built.clients, number)[0]:
        rows, model = built.data.client(client.id).rows, MODELS[client.arch]()
        model.load_state_dict(models[client.arch].state_dict())
        model.train()
        images, labels = built.data.dataset.batch(rows).contiguous(), built.data.dataset.labels[rows]
        optimiser = torch.optim.SGD(model.parameters(), lr=method.client.lr)
        for index in batches(len(rows), method.client.batch, method.client.steps):
            plain.step(model, optimiser, images[index], labels[index])
        taught.append(predict(model, parts["public"]).softmax(1))
        weights = list(model.state_dict().values())
        sent[client.arch].append(weights)
        heads.append(weights[-6:])
    consensus = torch.stack(taught)
    alpha = consensus.var(2) / consensus.var(2).sum(0)
    label = (alpha.unsqueeze(2) * consensus).sum(0).argmax(1)
    apart = (consensus.argmax(2) != label) * alpha
    diverse = (apart.unsqueeze(2) * consensus).sum(0)
    large = models["vgg19"]
    give_head(large, [torch.stack(same).mean(0) for same in zip(*heads, strict=True)])
    large.train()
    optimiser = torch.optim.SGD(large.parameters(), lr=method.server.lr)
    for index in batches(len(parts["public"]), method.server.batch, method.server.steps):
        optimiser.zero_grad()
        log = F.log_softmax(large(parts["public"][index]), 1)
        target = diverse[index]
        loss = F.nll_loss(log, label[index]) + method.lam * (torch.xlogy(target, target) - target * log).sum(1).mean()
        loss.backward()
        optimiser.step()
    for arch, all_weights in sent.items():
        if all_weights:
            names = models[arch].state_dict().keys()
            mean = [torch.stack(same).mean(0) for same in zip(*all_weights, strict=True)]
            models[arch].load_state_dict(dict(zip(names, mean, strict=True)))
        give_head(models[arch], list(large.state_dict().values())[-6:])
    predict(large, parts["test"])
    return clock.read()


@torch.no_grad()
def give_head(model, head):
    """Weight and bias of the last three layers."""
    for parameter, value in zip(list(model.parameters())[-6:], head, strict=True):
        parameter.copy_(value)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--stem", choices=["cifar", "imagenet"], default="cifar", help="of the ResNets")
    parser.add_argument("--steps", type=int, help="of a client and of the server, instead of 30 and 128")
    parser.add_argument("--public", type=int, help="public images, instead of 6,000")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "fedet-benchmarks", help="runs, decoded data")
    parser.add_argument("--json")
    args = parser.parse_args()
    asked = {"run.rounds": args.rounds, "data.dir": args.data_dir, "data.public_size": args.public}
    asked |= {"method.client.steps": args.steps, "method.server.steps": args.steps} if args.steps else {}
    if args.stem == "imagenet":
        asked["models.clients"] = ["cnn", *({"name": name, "stem": args.stem} for name in ("resnet8", "resnet18"))]
    changes = json.dumps({key: value for key, value in asked.items() if value is not None})
    machine, ours, theirs = hardware(), [], []
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
        other.submit(prepare, changes, str(args.out)).result()
        clock, peak = Clock(apart=other._processes), Peak(apart=other._processes)

        def after_round(entry):
            ours.append(clock.read())
            theirs.append(other.submit(one_round, entry["round"], changes, str(args.out)).result())
            print(f"round {entry['round']}: fedet {ours[-1]['wall']:.1f} s, plain {theirs[-1]['wall']:.1f} s", flush=True)
            clock.restart()

        fedet.run("cifar10-paper", out=args.out, callbacks=Callbacks(round=after_round), **json.loads(changes))
        most = peak.stop()
    report(ours, theirs, most, machine, args.json)


def report(ours, theirs, most, machine, path):
    """Means over the rounds: a round's clients may be in the reading before, so single ones say little."""
    mean = {
        side: {kind: round(sum(t[kind] for t in found) / len(found), 1) for kind in ("wall", "cpu")}
        for side, found in (("fedet", ours), ("plain", theirs))
    }
    ratios = {kind: round(mean["fedet"][kind] / mean["plain"][kind], 3) for kind in ("wall", "cpu")}
    rows = [[kind, mean["fedet"][kind], mean["plain"][kind], ratios[kind]] for kind in ("wall", "cpu")]
    table(["seconds a round", "fedet", "plain", "ratio"], rows)
    print(f"fedet's peak memory, all its processes: {most} MB; machine {machine}")
    write(path, {"hardware": machine, "rounds": len(ours), "fedet": ours, "plain": theirs, "ratio": ratios, "peak_mb": most})


if __name__ == "__main__":
    main()
