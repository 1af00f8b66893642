"""Leased network ports: each port has one owner on this machine until it is released."""

from penstock.ports.lease import PortLease, PortLeases, lease_port, leases

__all__ = ["PortLease", "PortLeases", "lease_port", "leases"]
