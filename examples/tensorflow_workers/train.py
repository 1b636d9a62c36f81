"""TensorFlow's MultiWorkerMirroredStrategy over all tasks of the job: place and addresses come from TF_CONFIG.

With `-e TF_ROLES=chief,evaluator` rank 0 is the chief and the last rank evaluates the chief's checkpoints. After a restart the training
continues from the newest checkpoint.
"""

from __future__ import annotations

import json
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before the import: no lines about instructions and missing GPUs

import tensorflow as tf

STEPS, SAVE_EVERY = 40, 5
FOLDER = os.environ["PHALANX_CHECKPOINT_DIR"]
EVALUATION_S = 120.0  # the evaluator waits no longer for the last checkpoint


def train() -> None:
    """Fit a line by gradient descent; every task has the same data, so the result is known."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    resolver = strategy.cluster_resolver
    first = (resolver.task_type, resolver.task_id) in {("chief", 0), ("worker", 0)} and (
        resolver.task_type == "chief" or "chief" not in resolver.cluster_spec().jobs
    )
    print(f"{resolver.task_type} {resolver.task_id}: {strategy.num_replicas_in_sync} replicas", flush=True)
    with strategy.scope():
        weight, done = tf.Variable(0.0), tf.Variable(0, dtype=tf.int64)
    saved = tf.train.Checkpoint(weight=weight, done=done)
    newest = tf.train.latest_checkpoint(FOLDER)
    if newest:
        saved.restore(newest)
        print(f"resumed at step {int(done.numpy())}", flush=True)

    @tf.function
    def step() -> tf.Tensor:
        def each() -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.square(weight * 2.0 - 6.0)
            context = tf.distribute.get_replica_context()
            gradient = context.all_reduce(tf.distribute.ReduceOp.MEAN, tape.gradient(loss, weight))
            weight.assign_sub(0.05 * gradient)
            done.assign_add(1)
            return loss

        return strategy.reduce(tf.distribute.ReduceOp.MEAN, strategy.run(each), axis=None)

    own = (
        FOLDER
        if first
        else os.path.join(os.environ["PHALANX_OUTPUT_DIR"], f"unused-{resolver.task_type}-{resolver.task_id}")
    )
    manager = tf.train.CheckpointManager(saved, own, max_to_keep=2, checkpoint_name="step")
    while int(done.numpy()) < STEPS:
        loss = float(step())
        number = int(done.numpy())
        if number % SAVE_EVERY == 0:  # every task takes part in a save, the chief's counts
            manager.save(checkpoint_number=number)
            if first:
                print(f"step {number}: loss {loss:.4f}", flush=True)
        time.sleep(0.2)
    print(f"done: weight {float(weight.numpy()):.3f}", flush=True)


def evaluate() -> None:
    """Evaluate each checkpoint of the chief."""
    weight, done = tf.Variable(0.0), tf.Variable(0, dtype=tf.int64)
    seen, until_s = "", time.monotonic() + EVALUATION_S
    while int(done.numpy()) < STEPS and time.monotonic() < until_s:
        newest = tf.train.latest_checkpoint(FOLDER) or ""
        if newest != seen:
            tf.train.Checkpoint(weight=weight, done=done).restore(newest)
            seen = newest
            print(f"evaluator: step {int(done.numpy())}, error {abs(float(weight.numpy()) - 3.0):.4f}", flush=True)
        time.sleep(0.5)
    print("done: evaluated" if int(done.numpy()) >= STEPS else "evaluator: no last checkpoint", flush=True)


if __name__ == "__main__":
    evaluate() if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "evaluator" else train()
