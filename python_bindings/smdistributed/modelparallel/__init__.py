"""Model-parallel training of PyTorch models, with the API of SageMaker's library; `.torch` is where everything is."""

# Scripts compare it with releases of SageMaker's library, of which this one has the API of the last 1.x.
__version__ = "1.15.0"
