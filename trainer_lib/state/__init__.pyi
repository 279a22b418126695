from trainer_lib.foundation.compat import ThreadLocalSharedDict as ThreadLocalSharedDict
from trainer_lib.options.enums import DistributedType as DistributedType
from trainer_lib.state.accelerator_state import AcceleratorState as AcceleratorState
from trainer_lib.state.gradient_state import GradientState as GradientState
from trainer_lib.state.partial_state import PartialState as PartialState
from trainer_lib.state.partial_state import is_initialized as is_initialized
from trainer_lib.state.rank_control import do_nothing as do_nothing

__all__: list[str]
