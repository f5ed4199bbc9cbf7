"""Engines that prefill apart from those that decode: what SGLang needs beside its own code."""
