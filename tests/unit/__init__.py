"""Tests of jaxcompat's own behaviour, which need neither JAX nor Orbax.

What happens at an import happens in child interpreters, whose site holds toy distributions
(`toys`) and nothing else that is installed here but jaxcompat and what it depends on.
"""
