"""Computation graphs, schedules, and the simulator that computes a schedule's peak and time. Independent of torch."""

from __future__ import annotations

from fckpt.graph.graph import DECISIONS as DECISIONS
from fckpt.graph.graph import Graph as Graph
from fckpt.graph.graph import Node as Node
from fckpt.graph.graph import Value as Value
from fckpt.graph.schedule import Compute as Compute
from fckpt.graph.schedule import Free as Free
from fckpt.graph.schedule import Schedule as Schedule
from fckpt.graph.schedule import schedule_of as schedule_of
from fckpt.graph.simulation import Timeline as Timeline
from fckpt.graph.simulation import simulate as simulate

__all__ = ["DECISIONS", "Compute", "Free", "Graph", "Node", "Schedule", "Timeline", "Value", "schedule_of", "simulate"]
