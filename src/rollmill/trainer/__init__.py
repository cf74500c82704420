"""The trainer: packing, the optimizer step, the loop around it.

Nothing is imported here, because most of it needs torch: take `Trainer` from `rollmill.trainer.step`, `TrainerLoop`
from `rollmill.trainer.loop`, `load_policy` from `rollmill.trainer.model`.
"""
