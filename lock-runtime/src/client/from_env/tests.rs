use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn read(vars: &[(&str, &str)]) -> Result<Settings, LockError> {
    let url = ("LOCK_URL", "memory:");
    let is_set = vars.iter().any(|(name, _)| *name == url.0);
    let all = [&[url][usize::from(is_set)..], vars].concat();
    let all = all
        .into_iter()
        .map(|(name, value)| (name.into(), value.into()));
    Settings::read(all)
}

#[test]
fn each_example_is_valid_and_changes_the_settings() {
    let plain = format!("{:?}", read(&[]).unwrap());
    for variable in VARIABLES {
        if CERTIFICATES.contains(&variable.name) || PASSWORD_FILES.contains(&variable.name) {
            continue;
        }
        #[cfg(feature = "redis")]
        let others: &[_] = match variable.name {
            "LOCK_REPLICA_TIMEOUT" => &[("LOCK_MIN_REPLICAS", "1")],
            _ => &[],
        };
        #[cfg(not(feature = "redis"))]
        let others: &[_] = &[];
        let with = [others, &[(variable.name, variable.example)]].concat();
        #[cfg(not(feature = "redis"))]
        if [
            "LOCK_MIN_REPLICAS",
            "LOCK_LONGEST_LEASE",
            "LOCK_REPLICA_TIMEOUT",
        ]
        .contains(&variable.name)
        {
            assert!(read(&with).is_err());
            continue;
        }
        let mut settings = read(&with).unwrap();
        settings.set.clear();
        assert_ne!(
            format!("{settings:?}"),
            plain.replace("[\"LOCK_URL\"]", "[]"),
            "{}",
            variable.name
        );
    }
}

#[test]
fn the_variables_set_the_options() {
    let settings = read(&[
        ("LOCK_NAMESPACE", " shop "),
        ("LOCK_IDENTITY", "a@b"),
        ("LOCK_LEASE", "10s"),
        ("LOCK_WAIT", "1m 30s"),
        ("LOCK_RENEW", "false"),
        ("LOCK_STRICT_ORDER", "1"),
        ("LOCK_MIN_HOLD", ""),
        ("LOCK_ON_LOST", "ignore"),
        ("LOCK_MAX_WAITERS", "7"),
    ])
    .unwrap();
    let builder = settings.builder;
    assert_eq!(builder.namespace, "shop");
    assert!(format!("{builder:?}").contains("Given(\"a@b\")"));
    let spec = LockSpec::exclusive().lease(10 * SECOND).wait(90 * SECOND);
    let spec = spec.no_renew().strict_order().on_lost(OnLost::Ignore);
    assert_eq!(builder.defaults, spec);
    assert_eq!(
        (builder.waiters.per_key, builder.waiters.in_all),
        (7, 100_000)
    );
    let unset = read(&[("LOCK_NO_WAIT", "true"), ("LOCK_REENTRANT", "true")]).unwrap();
    assert_eq!(
        unset.builder.defaults,
        LockSpec::exclusive().no_wait().reentrant()
    );
}

#[test]
fn an_invalid_value_is_reported_with_the_variable() {
    for (vars, words) in [
        (&[("LOCK_URL", " ")][..], "LOCK_URL is not set"),
        (
            &[("LOCK_LEASE", "30")],
            "LOCK_LEASE: \"30\" is not a duration",
        ),
        (
            &[("LOCK_LEASE", "1ms")],
            "LOCK_LEASE: a lease of 1ms is out of range",
        ),
        (&[("LOCK_WAIT", "100h")], "LOCK_WAIT: a wait of 100h"),
        (
            &[("LOCK_RENEW", "maybe")],
            "LOCK_RENEW: \"maybe\" is not true or false",
        ),
        (
            &[("LOCK_ON_LOST", "finish")],
            "LOCK_ON_LOST: \"finish\" is not cancel, error or ignore",
        ),
        (
            &[("LOCK_MAX_WAITERS", "-1")],
            "LOCK_MAX_WAITERS: \"-1\" is not a number",
        ),
        (
            &[("LOCK_NO_WAIT", "true"), ("LOCK_WAIT", "1s")],
            "leave one out",
        ),
        (
            &[("LOCK_MIN_HOLD", "2s"), ("LOCK_MAX_HOLD", "1s")],
            "LOCK_MAX_HOLD, LOCK_MIN_HOLD: a min_hold of 2s is longer",
        ),
    ] {
        let error = read(vars).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[cfg(feature = "redis")]
#[test]
fn an_invalid_option_of_redis_is_reported_with_the_variable() {
    for (vars, words) in [
        (
            &[("LOCK_NAMESPACE", "a:b")][..],
            "LOCK_NAMESPACE: the namespace \"a:b\" contains ':'",
        ),
        (
            &[("LOCK_MIN_REPLICAS", "0")],
            "LOCK_MIN_REPLICAS: \"0\" is not a number in range",
        ),
        (
            &[("LOCK_REPLICA_TIMEOUT", "50ms")],
            "LOCK_REPLICA_TIMEOUT: it has no effect",
        ),
        (
            &[("LOCK_MIN_REPLICAS", "1"), ("LOCK_REPLICA_TIMEOUT", "2s")],
            "LOCK_REPLICA_TIMEOUT: `min_replicas`: the time-out must be",
        ),
        (
            &[("LOCK_LONGEST_LEASE", "1ms")],
            "LOCK_LONGEST_LEASE: a lease of 1ms",
        ),
    ] {
        let error = read(vars).unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::InvalidSpec);
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[cfg(feature = "redis-rustls")]
#[test]
fn a_certificate_file_is_read_or_reported() {
    for (vars, words) in [
        (
            &[("LOCK_ROOT_CERTIFICATE", "/nowhere.pem")][..],
            "LOCK_ROOT_CERTIFICATE: `root_certificate`: the file",
        ),
        (
            &[("LOCK_ROOT_CERTIFICATE", file!())],
            "LOCK_ROOT_CERTIFICATE: `root_certificate`: the file",
        ),
        (
            &[("LOCK_CLIENT_KEY", "Cargo.toml")],
            "LOCK_CLIENT_CERTIFICATE: LOCK_CLIENT_KEY needs",
        ),
        (
            &[("LOCK_ROOT_CERTIFICATE", "Cargo.toml")],
            "LOCK_ROOT_CERTIFICATE: `root_certificate`",
        ),
    ] {
        let error = read(vars).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
    let file = std::env::temp_dir().join(format!("from-env-{}.pem", std::process::id()));
    let text = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    std::fs::write(&file, text).unwrap();
    let certificate = ("LOCK_ROOT_CERTIFICATE", file.to_str().unwrap());
    let plain = read(&[("LOCK_URL", "redis://rediss-a"), certificate]).unwrap_err();
    let expected =
        "LOCK_ROOT_CERTIFICATE: it has no effect, as LOCK_URL does not begin with rediss://";
    assert!(plain.to_string().starts_with(expected), "{plain}");
    let sentinels = "redis+sentinel://a/m?sentinel_tls=true";
    for url in ["rediss+cluster://a", "REDISS://a", sentinels] {
        read(&[("LOCK_URL", url), certificate]).unwrap();
    }
    std::fs::remove_file(file).unwrap();
}

#[cfg(any(feature = "redis", feature = "postgres", feature = "etcd"))]
#[test]
fn a_password_file_is_read_or_reported_and_never_shown() {
    let (redis, sentinels) = ("redis://app@a", "redis+sentinel://a/m");
    for (url, name, path, words) in [
        (redis, "LOCK_PASSWORD_FILE", "/nowhere", "cannot be read"),
        (redis, "LOCK_PASSWORD_FILE", "/dev/null", "is empty"),
        (redis, OF_SENTINELS, "Cargo.toml", "it has no effect"),
        (
            "Memory://",
            "LOCK_PASSWORD_FILE",
            "Cargo.toml",
            "it has no effect",
        ),
    ] {
        let error = read(&[("LOCK_URL", url), (name, path)]).unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::InvalidSpec);
        let (text, name) = (error.to_string(), format!("{name}: "));
        assert!(text.starts_with(&name) && text.contains(words), "{text}");
    }
    for (url, name) in [
        (redis, "LOCK_PASSWORD_FILE"),
        ("postgres://app@a/b", "LOCK_PASSWORD_FILE"),
        (sentinels, OF_SENTINELS),
    ] {
        let settings = read(&[("LOCK_URL", url), (name, "Cargo.toml")]).unwrap();
        assert!(!format!("{settings:?}").contains("lock-runtime\""));
    }
}

#[cfg(unix)]
#[test]
fn a_value_that_is_no_text_is_reported_with_the_variable() {
    use std::os::unix::ffi::OsStringExt as _;
    let bytes = || OsString::from_vec(vec![0xff]);
    let error = Settings::read([("LOCK_URL".into(), bytes())]).unwrap_err();
    assert_eq!(error.to_string(), "LOCK_URL: the value is not valid UTF-8");
    // Other variables are no matter of the client.
    let foreign = [("LOCK_URL".into(), "memory:".into()), (bytes(), bytes())];
    assert!(Settings::read(foreign).is_ok());
}

#[test]
fn an_error_on_connect_names_the_variables() {
    let of = |error| blame(error, &["LOCK_MIN_REPLICAS", "LOCK_URL", "LOCK_WAIT"]).to_string();
    assert_eq!(
        of(LockError::new(LockErrorKind::InvalidUrl, "no")),
        "LOCK_URL: no"
    );
    let settings = &["min_replicas", "lease"];
    assert_eq!(
        of(LockError::of_settings(settings, "no waiting")),
        "LOCK_MIN_REPLICAS: no waiting"
    );
    // A word of the text is no setting.
    for kind in [LockErrorKind::InvalidSpec, LockErrorKind::Unavailable] {
        assert_eq!(of(LockError::new(kind, "wait")), "wait");
    }
    #[cfg(feature = "redis")]
    {
        let error = crate::store::StoreError::new(crate::store::StoreErrorKind::Unsupported, "x");
        let error = of(LockError::from_store(error.of_settings(&["wait"])));
        assert!(error.starts_with("LOCK_WAIT: "), "{error}");
    }
}

/// The check before the store is opened knows neither.
#[cfg(any(feature = "etcd", feature = "zookeeper"))]
#[tokio::test]
async fn a_namespace_that_a_store_refuses_is_reported_with_the_variable() {
    for url in [
        #[cfg(feature = "etcd")]
        "etcd://127.0.0.1:1",
        #[cfg(feature = "zookeeper")]
        "zookeeper://127.0.0.1:1",
    ] {
        let Settings { builder, set, .. } =
            read(&[("LOCK_URL", url), ("LOCK_NAMESPACE", "a/b")]).unwrap();
        let error = blame(builder.connect(url).await.unwrap_err(), &set).to_string();
        assert!(error.starts_with("LOCK_NAMESPACE: "), "{error}");
    }
}

#[test]
fn a_misspelled_name_is_noticed_and_a_foreign_one_is_not() {
    for (name, meant) in [
        ("LOCK_LEASES", Some("LOCK_LEASE")),
        ("LOCK_URI", Some("LOCK_URL")),
        ("LOCK_MAXWAITERS", Some("LOCK_MAX_WAITERS")),
        ("LOCK_NAME_SPACE", Some("LOCK_NAMESPACE")),
        ("LOCK_FILE", None),
        ("LOCK_DATABASE_PASSWORD", None),
    ] {
        assert_eq!(nearest(name), meant, "{name}");
    }
}
