"""Properties are tested with the same examples on every run, however busy the machine is.

pytest --hypothesis-profile=explore       # other examples each time, to look for what the fixed ones miss
"""

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a GPU machine runs single files that need none
    pass
else:
    settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("steady", settings.get_profile("explore"), derandomize=True, database=None)
    settings.load_profile("steady")
