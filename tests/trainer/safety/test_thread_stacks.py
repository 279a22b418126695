"""The stack of the training thread is read by another thread, while torch compiles too."""

import threading
import time

import torch

from trainer_lib.trainer.safety.thread_stacks import Stack


def test_a_stack_ends_at_the_compiler() -> None:
    """Behind it is a frame that torch evaluates itself, in whose place another thread finds whatever is there."""
    thread, seen, is_done = threading.get_ident(), list[Stack](), threading.Event()

    def look() -> None:
        while not is_done.is_set():
            seen.append(Stack(thread))
            time.sleep(0.002)

    watching = threading.Thread(target=look)
    watching.start()
    try:
        for size in range(3, 7):
            torch._dynamo.reset()
            torch.compile(lambda x: (x * 2).sin().sum(), backend="eager")(torch.ones(size))
    finally:
        is_done.set()
        watching.join()
    compiling = [stack for stack in seen if stack.is_compiling]
    assert compiling
    for stack in compiling:
        assert "torch/_dynamo/convert_frame.py" in stack.frames[-1].f_code.co_filename
    assert not Stack(thread).is_compiling
