//! Configuration by environment variables, in a process that has them.

use lock_tests::{RedisServer, Worker, unique};

/// The lines of a process with these variables.
async fn with(variables: &[&str]) -> Vec<String> {
    let worker = env!("CARGO_BIN_EXE_lock-worker");
    let mut worker = Worker::spawn("env", &[variables, &[worker, "from-env"]].concat());
    worker.close_input();
    worker.lines().await
}

#[tokio::test]
async fn a_process_is_configured_by_its_environment() {
    let server = RedisServer::builder().password("hunter2").start().await;
    let namespace = unique("env");
    let url = format!("LOCK_URL={}", server.url());
    let namespaced = format!("LOCK_NAMESPACE={namespace}");
    let named = "LOCK_IDENTITY=worker@test";
    let lines = with(&[&url, &namespaced, named, "LOCK_LEASES=5s", "LOCK_WAIT="]).await;
    assert_eq!(lines, ["LOCK_LEASES -> LOCK_LEASE", "released"]);
    let fences = server.keys(&format!("{{{namespace}:*")).await;
    assert_eq!(fences, [format!("{{{namespace}:k}}:f")]);
    let clients = server.keys(&format!("f:{namespace}:client:*")).await;
    assert_eq!(clients.len(), 1, "{clients:?}");
    let name: String = server.query(&["GET", &clients[0]]).await;
    assert_eq!(name, "worker@test");
}

#[tokio::test]
async fn an_error_names_the_variable_and_no_password() {
    for (variables, code, words) in [
        (
            &["-u", "LOCK_URL"][..],
            "invalid_url",
            "LOCK_URL is not set",
        ),
        (
            &["LOCK_URL=redsi://:hunter2@h"],
            "invalid_url",
            "LOCK_URL: the URL does not name",
        ),
        (
            &["LOCK_URL=redis://:hunter2@h:x"],
            "invalid_url",
            "LOCK_URL: ",
        ),
        (
            &["LOCK_URL=memory:", "LOCK_LEASE=5"],
            "invalid_spec",
            "LOCK_LEASE: \"5\" is not a duration",
        ),
        (
            &[
                "LOCK_URL=redis+cluster://:hunter2@127.0.0.1:1",
                "LOCK_MIN_REPLICAS=1",
            ],
            "invalid_spec",
            "LOCK_MIN_REPLICAS: ",
        ),
    ] {
        let lines = with(variables).await;
        let [line] = &lines[..] else {
            panic!("{lines:?}")
        };
        assert!(line.starts_with(&format!("{code} {words}")), "{line}");
        assert!(!line.contains("hunter2"), "{line}");
    }
}
