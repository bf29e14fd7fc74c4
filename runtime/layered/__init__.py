"""Models of the user's own that run layer by layer (`Layered`): alone, or along a pipeline of workers.

The same stages, links, frames and consolidation as the language models of `runtime.llm`, for any activations.
"""

__all__: list[str] = []
