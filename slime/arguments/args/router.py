"""The flags of the router as attributes with their types.

Written by `python -m tools.gen_args` from slime/arguments/passthrough; change it there.
"""

from __future__ import annotations


class RouterArgs:
    """The flags of the router."""

    # router
    router_policy: str
    router_prefill_policy: str | None
    router_decode_policy: str | None
    router_cache_threshold: float
    router_balance_abs_threshold: int
    router_balance_rel_threshold: float
    router_bucket_adjust_interval_secs: int
    router_eviction_interval_secs: int
    router_max_tree_size: int
    router_max_idle_secs: int
    router_assignment_mode: str
    router_max_payload_size: int
    router_dp_aware: bool
    router_enable_igw: bool
    router_mini_lb: bool
    router_worker_startup_timeout_secs: int
    router_worker_startup_check_interval: int
    router_log_dir: str | None
    router_log_level: str
    router_service_discovery: bool
    router_selector: list[str] | dict[str, str]
    router_service_discovery_port: int
    router_service_discovery_namespace: str | None
    router_prefill_selector: list[str] | dict[str, str]
    router_decode_selector: list[str] | dict[str, str]
    router_prometheus_port: int
    router_prometheus_host: str
    router_prometheus_duration_buckets: list[float] | None
    router_request_id_headers: list[str] | None
    router_shutdown_grace_period_secs: int
    router_cors_allowed_origins: list[str]
    router_max_concurrent_requests: int
    router_queue_size: int
    router_queue_timeout_secs: int
    router_rate_limit_tokens_per_second: int | None
    router_retry_max_retries: int
    router_retry_initial_backoff_ms: int
    router_retry_max_backoff_ms: int
    router_retry_backoff_multiplier: float
    router_retry_jitter_factor: float
    router_disable_retries: bool
    router_disable_circuit_breaker: bool
    router_disable_health_check: bool
    router_model_path: str | None
    router_tokenizer_path: str | None
    router_chat_template: str | None
    router_tokenizer_cache_enable_l0: bool
    router_tokenizer_cache_l0_max_entries: int
    router_tokenizer_cache_enable_l1: bool
    router_tokenizer_cache_l1_max_memory: int
    router_reasoning_parser: str | None
    router_tool_call_parser: str | None
    router_mcp_config_path: str | None
    router_backend: str
    router_history_backend: str
    router_oracle_wallet_path: str | None
    router_oracle_tns_alias: str | None
    router_oracle_connect_descriptor: str | None
    router_oracle_username: str | None
    router_oracle_password: str | None
    router_oracle_pool_min: int
    router_oracle_pool_max: int
    router_oracle_pool_timeout_secs: int
    router_postgres_db_url: str | None
    router_postgres_pool_max: int
    router_redis_url: str | None
    router_redis_pool_max: int
    router_redis_retention_days: int
    router_client_cert_path: str | None
    router_client_key_path: str | None
    router_ca_cert_paths: list[str]
    router_tls_cert_path: str | None
    router_tls_key_path: str | None
    router_enable_trace: bool
    router_otlp_traces_endpoint: str
    router_control_plane_api_keys: list[str]
    router_control_plane_audit_enabled: bool
    router_jwt_issuer: str | None
    router_jwt_audience: str | None
    router_jwt_jwks_uri: str | None
    router_jwt_role_mapping: list[str]
