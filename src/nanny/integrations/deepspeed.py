"""For DeepSpeed: the module of an engine.

    from nanny.integrations.deepspeed import watch

    engine, *_ = deepspeed.initialize(model=model, config=settings)
    with watch(engine):
        ...  # engine(batch), engine.backward(loss), engine.step()

Seen are steps, loss, module outputs and examined steps. Gradients are seen with ZeRO stage 0; from stage 1 on DeepSpeed keeps
them in partitions of its own, where only a collective of all ranks could read them, which the nanny never starts. A step that
DeepSpeed refuses is told together with the one that follows.
"""

from __future__ import annotations

from typing import Any

from ..core.terminal import tell
from ..monitor.watch import MixedPrecisionNanny


def watch(engine: Any, **options: Any) -> MixedPrecisionNanny:
    """Takes what `MixedPrecisionNanny` takes by name. Steps have the engine's own numbers, so those of a resumed training go on.

    The model is found when it is called: the engine's optimizer updates copies of its parameters, and that is heard then, too.
    """
    stage = engine.zero_optimization_stage()
    if stage > 0 and options.get("live", True):
        tell(f"nanny: ZeRO stage {stage} keeps gradients in partitions: they are not seen, all else is")
    nanny = MixedPrecisionNanny(None, **options)
    nanny.steps_by_themselves(find_models=True, first=engine.global_steps)
    return nanny
