"""Lets what a program imports after this module find raymoe's `deep_ep`."""

from __future__ import annotations

from raymoe.integrations.deep_ep import ElasticBuffer as ElasticBuffer
from raymoe.integrations.deep_ep import install

install()
