"""User-defined layered models (`Layered`): run on one worker or along a pipeline.

They use the same links, frames and stage lifecycles as the language models of `runtime.llm`, for any activations.
"""

__all__: list[str] = []
