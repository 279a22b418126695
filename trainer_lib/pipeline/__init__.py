"""Pipeline parallelism: each rank holds some consecutive layers of a model."""

from trainer_lib.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]
