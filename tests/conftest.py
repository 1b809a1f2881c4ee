from hypothesis import HealthCheck, settings

# The machines that run this are shared: a slow draw is not a failure, and the same cases are drawn every time.
settings.register_profile(
    "backbeat",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("backbeat")
