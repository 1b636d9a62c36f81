"""Train a policy for CartPole by the cross-entropy method; the rollouts run in the workers of a `phalanx.Executor`.

Each generation draws policies, rolls each out in the environment in a worker, and keeps the best. All draws and episodes have seeds, so a
training is the same on any number of workers, also if some die.
Source: R. Y. Rubinstein, European Journal of Operational Research 99 (1997); for policies: I. Szita and A. Lorincz, Neural Computation 18 (2006).
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import as_completed
from pathlib import Path

import gymnasium
import matplotlib as mpl
import numpy as np

import phalanx

mpl.use("Agg")
import matplotlib.pyplot as plt

ENVIRONMENT, PARAMETERS, MOST = "CartPole-v1", 5, 500.0
ELITE = 8


def rollout(weights: list[float], seeds: list[int]) -> float:
    """Return the mean return of a linear policy over episodes with these seeds."""
    environment, total = gymnasium.make(ENVIRONMENT), 0.0
    slope, bias = np.array(weights[:-1]), weights[-1]
    for seed in seeds:
        state, _ = environment.reset(seed=seed)
        ended = False
        while not ended:
            state, reward, failed, timed_out, _ = environment.step(int(slope @ state + bias > 0))
            total += float(reward)
            ended = failed or timed_out
    environment.close()
    return total / len(seeds)


def main() -> None:
    """Train, test on new episodes, and write `result.json` and `picture.png`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", type=int, default=10)
    parser.add_argument("--population", type=int, default=40)
    parser.add_argument("--episodes", type=int, default=4, help="of each policy in a generation")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--output", type=Path, default=Path("output"))
    options = parser.parse_args()
    mean, deviation, history = np.zeros(PARAMETERS), np.full(PARAMETERS, 1.0), []
    with phalanx.Executor(gpus=1, max_workers=options.workers, name="rollouts") as pool:
        for generation in range(options.generations):
            draw = np.random.default_rng([18, generation])
            policies = mean + deviation * draw.standard_normal((options.population, PARAMETERS))
            seeds = [1000 * generation + episode for episode in range(options.episodes)]
            futures = [pool.submit(rollout, policy.tolist(), seeds) for policy in policies]
            for done, _ in enumerate(as_completed(futures), 1):
                print(f"job {pool.job_id}: generation {generation}, {done} of {len(futures)} rollouts", flush=True)
            returns = np.array([future.result() for future in futures])
            best = policies[np.argsort(-returns, kind="stable")[:ELITE]]
            mean, deviation = best.mean(axis=0), best.std(axis=0) + 0.1 / (1 + generation)
            history.append(
                {
                    "mean": float(returns.mean()),
                    "best": float(returns.max()),
                    "elite": float(np.sort(returns)[-ELITE:].mean()),
                }
            )
            print(
                f"generation {generation}: mean {history[-1]['mean']:.1f}, best {history[-1]['best']:.1f} of {MOST:.0f}",
                flush=True,
            )
        tests = list(pool.map(rollout, [mean.tolist()] * 20, [[10**6 + episode] for episode in range(20)]))
    result = {"history": history, "weights": mean.tolist(), "test": tests}
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, colour in (("best", "#2e7d32"), ("elite", "#b8860b"), ("mean", "#00539c")):
        axes.plot([one[name] for one in history], "o-", color=colour, label=f"{name} of the generation")
    axes.axhline(float(np.mean(tests)), color="black", linestyle="--", label="final policy, 20 new episodes")
    axes.set(
        xlabel="generation",
        ylabel="steps until the pole falls",
        title=f"{ENVIRONMENT}, cross-entropy method",
        ylim=(0, MOST * 1.05),
    )
    axes.legend(loc="lower right")
    figure.savefig(options.output / "picture.png", dpi=110)
    print(f"final policy: {np.mean(tests):.1f} steps in 20 new episodes")


if __name__ == "__main__":
    main()
