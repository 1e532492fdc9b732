"""Which model folder is served, prepared before anything loads it."""

from shoal_model.prepare import DEFAULT_MODEL, ModelUnavailable, PreparedModel, prepare

__all__ = ["DEFAULT_MODEL", "ModelUnavailable", "PreparedModel", "prepare"]
