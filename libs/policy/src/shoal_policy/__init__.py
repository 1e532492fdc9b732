"""Scheduling decisions as pure functions of a snapshot: no I/O, no clock, nothing of ours imported."""

from shoal_policy.admission import AdmissionPolicy, AdmissionVerdict
from shoal_policy.affinity import UNKNOWN_PACE, AffinityPolicy, PrefillPace
from shoal_policy.expiry import ExpiryPolicy, TrafficClass
from shoal_policy.placement import PlacementPolicy
from shoal_policy.room import RoomPolicy
from shoal_policy.snapshot import AdmissionView, DecodeWorkerView
from shoal_policy.tiers import SINGLE_TIER, Tier, check_tiers, choose_tier, parse_tiers

__all__ = [
    "SINGLE_TIER",
    "UNKNOWN_PACE",
    "AdmissionPolicy",
    "AdmissionVerdict",
    "AdmissionView",
    "AffinityPolicy",
    "DecodeWorkerView",
    "ExpiryPolicy",
    "PlacementPolicy",
    "PrefillPace",
    "RoomPolicy",
    "Tier",
    "TrafficClass",
    "check_tiers",
    "choose_tier",
    "parse_tiers",
]
