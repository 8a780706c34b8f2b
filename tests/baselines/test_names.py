import lineartime.baselines
from lineartime.models.systems import SYSTEMS


def test_every_system_that_is_compared_can_be_imported_by_its_name() -> None:
    mixers = {system.mixer for system in SYSTEMS.values() if system.mixer.__module__.startswith("lineartime.baselines")}
    assert len(mixers) > 20
    assert {mixer.__name__ for mixer in mixers} <= set(lineartime.baselines.__all__)
