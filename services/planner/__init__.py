"""Planner: decides which devices shift to which role, and carries each shift out as a transaction.

owns      the allocation, device leases, plans and their records
consumes  `workload.state`
produces  `planner.plan`, `planner.shift.<id>`, KV `device.<id>`; commands `shift.<role>.{down,up}`
"""
