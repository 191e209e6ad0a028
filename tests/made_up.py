"""Records of runs that never were."""

from fedet.study.records import Record


def record(run, late, curves=None, **result):
    """A record of a planned run with this late accuracy; other results and curves as given."""
    best = result.get("best", late)
    plain = {
        "round": [20, 40], "accuracy": [best, late], "loss": [1.0] * 2, "params_total": [500, 1000],
        "seconds": [4.0, 9.0], "models": {},
    }  # fmt: skip
    plain |= curves or {}
    known = {
        "rounds": 40, "stopped": None, "best": late, "best_round": plain["round"][0], "late": late, "final": late,
        "converged": True, "params_up": 500, "params_down": 500, "bytes_up": 4, "bytes_down": 4, "seconds": {"total": 9.0},
        "c_acc": {}, "lost_rounds": 0, "failed_clients": 0, "arch_params": {}, "server": "cnn",
    }  # fmt: skip
    config = run.config.model_dump(mode="json", exclude_none=True)
    return Record(run.key, config, plain, known | result, {"torch": "2"}, {"cpu": "none"})
