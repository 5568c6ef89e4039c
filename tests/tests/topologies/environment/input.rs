//! Invalid input of callers: names, leases, numbers of permits, namespaces, URLs.

use lock_runtime::{LockClient, LockErrorKind, LockSpec};
use lock_tests::{place::cluster_url_of, shared_server, unique};

use super::{Duration, assert_says, permits, within};

async fn clients() -> [LockClient; 2] {
    [
        LockClient::in_memory(),
        LockClient::connect(&shared_server().await.url())
            .await
            .unwrap(),
    ]
}

#[tokio::test]
async fn a_bad_name_is_refused_with_what_is_wrong_with_it() {
    let long = "x".repeat(513);
    for locks in clients().await {
        for (name, words) in [
            ("", ["\"\"", "is empty", "order:42"]),
            (&long, ["\"xxxx", "512 bytes", "digest"]),
            (
                "line\nbreak",
                ["line\\nbreak", "control character", "placeholder"],
            ),
            ("nul\0", ["nul\\0", "control character", "placeholder"]),
            (
                "delete\u{7f}",
                ["delete\\u{7f}", "control character", "placeholder"],
            ),
            (
                "c1\u{85}",
                ["c1\\u{85}", "control character", "placeholder"],
            ),
            ("x}y", ["x}y", "hash tag", "{tag}"]),
            ("permits:x", ["permits:x", "reserved", "choose another"]),
        ] {
            let errors = [
                locks.exclusive(name).acquire().await.unwrap_err(),
                locks.shared(name).no_wait().acquire().await.unwrap_err(),
                locks
                    .permits(name, permits(2))
                    .try_acquire()
                    .await
                    .unwrap_err(),
                locks.all(["fine", name]).acquire().await.unwrap_err(),
                locks
                    .exclusive(name)
                    .run(|_| async { panic!("without the lock") })
                    .await
                    .unwrap_err(),
                locks.inspect(name).await.unwrap_err(),
                locks.revoke(name).also_endless().await.unwrap_err(),
            ];
            errors
                .iter()
                .for_each(|error| assert_says(error, LockErrorKind::InvalidKey, &words));
        }
        assert!(locks.inspect("fine").await.unwrap().holders.is_empty());
        let none: [&str; 0] = [];
        assert_says(
            &locks.all(none).acquire().await.unwrap_err(),
            LockErrorKind::InvalidKey,
            &["at least one"],
        );
    }
}

#[tokio::test]
async fn the_longest_name_is_a_lock() {
    for locks in clients().await {
        let name = format!("{:x<512}", unique("long"));
        for request in [
            locks.exclusive(name.as_str()),
            locks.permits(name.as_str(), permits(2)),
        ] {
            request.acquire().await.unwrap().release().await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_lease_out_of_range_is_refused_with_the_range() {
    for locks in clients().await {
        let name = unique("lease");
        for lease in [
            Duration::ZERO,
            Duration::from_millis(99),
            LockSpec::MAX_LEASE + Duration::from_millis(1),
            Duration::MAX,
        ] {
            let words = [name.as_str(), "lease", "100 ms to 24 h"];
            let error = locks
                .exclusive(name.as_str())
                .lease(lease)
                .acquire()
                .await
                .unwrap_err();
            assert_says(&error, LockErrorKind::InvalidSpec, &words);
            let guard = locks.exclusive(name.as_str()).acquire().await.unwrap();
            assert_says(
                &guard.extend(lease).await.unwrap_err(),
                LockErrorKind::InvalidSpec,
                &words,
            );
            guard.release().await.unwrap();
        }
        assert!(
            locks
                .inspect(name.as_str())
                .await
                .unwrap()
                .holders
                .is_empty()
        );
        for lease in [Duration::from_millis(100), LockSpec::MAX_LEASE] {
            drop(
                locks
                    .exclusive(name.as_str())
                    .lease(lease)
                    .no_renew()
                    .acquire()
                    .await
                    .unwrap()
                    .release()
                    .await,
            );
        }
    }
}

#[tokio::test]
async fn connect_refuses_invalid_defaults_before_it_connects() {
    let builder =
        LockClient::builder().defaults(LockSpec::exclusive().lease(Duration::from_millis(1)));
    let error = builder.clone().build_in_memory().unwrap_err();
    assert_says(&error, LockErrorKind::InvalidSpec, &["100 ms to 24 h"]);
    let error = builder.connect("redis://127.0.0.1:1").await.unwrap_err();
    assert_says(&error, LockErrorKind::InvalidSpec, &["100 ms to 24 h"]);
}

#[tokio::test]
async fn acquire_in_another_mode_reports_the_lock_as_held() {
    for locks in clients().await {
        let name = unique("mode");
        let reader = locks.shared(name.as_str()).acquire().await.unwrap();
        let error = locks
            .exclusive(name.as_str())
            .no_wait()
            .acquire()
            .await
            .unwrap_err();
        assert_says(&error, LockErrorKind::Contended, &[&name, "holds it"]);
        assert!(error.free_in().is_some());
        assert_says(
            &reader.downgrade().await.unwrap_err(),
            LockErrorKind::ModeMismatch,
            &[&name, "exclusive"],
        );

        let writer = locks
            .exclusive(name.as_str())
            .wait(super::SLACK)
            .acquire()
            .await
            .unwrap();
        let wait = Duration::from_millis(50);
        let error = within(wait, locks.shared(name.as_str()).wait(wait).acquire())
            .await
            .unwrap_err();
        assert_says(&error, LockErrorKind::WaitTimeout, &[&name, "still held"]);
        writer.release().await.unwrap();
    }
}

#[tokio::test]
async fn a_bad_namespace_is_refused_with_the_remedy() {
    let url = shared_server().await.url();
    let long = "n".repeat(65);
    for (namespace, words) in [
        ("", ["\"\"", "empty", "\"lock\""]),
        (&long, ["nnn", "64 bytes", "shorter"]),
        ("a{b}", ["a{b}", "brace", "hash tags"]),
        ("a\nb", ["a\\nb", "control", "leave it out"]),
        ("f", ["f", "reserved", "longer word"]),
        ("a:permits", ["a:permits", "':'", "shop-eu"]),
    ] {
        let builder = LockClient::builder().namespace(namespace);
        for url in [&url, &cluster_url_of([&url])] {
            let error = builder.clone().connect(url).await.unwrap_err();
            assert_says(&error, LockErrorKind::InvalidSpec, &words);
        }
    }
}

#[tokio::test]
async fn namespaces_share_no_lock() {
    let url = shared_server().await.url();
    let name = unique("shared");
    let mut guards = Vec::new();
    for namespace in ["a", "a-b", "a*", "ä ö", "[x]?"] {
        let locks = LockClient::builder()
            .namespace(namespace)
            .connect(&url)
            .await
            .unwrap();
        guards.push(
            locks
                .exclusive(name.as_str())
                .no_wait()
                .acquire()
                .await
                .unwrap(),
        );
    }
    for guard in guards {
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn a_store_in_this_process_is_named_with_and_without_a_colon() {
    for url in ["memory:", "memory://", "memory"] {
        for connected in [
            LockClient::connect(url).await,
            LockClient::builder().connect(url).await,
        ] {
            let locks = connected.unwrap_or_else(|error| panic!("{url:?}: {error}"));
            locks
                .exclusive("k")
                .acquire()
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
        }
    }
    let error = LockClient::connect("memory:orders").await.unwrap_err();
    assert_says(
        &error,
        LockErrorKind::InvalidUrl,
        &["\"memory:\" and nothing else"],
    );
}

#[tokio::test]
async fn connect_refuses_a_wrong_url_without_printing_its_password() {
    for url in [
        "",
        " ",
        "localhost",
        "127.0.0.1:6379",
        "//user:hunter2@127.0.0.1",
        "redis:user:hunter2@127.0.0.1",
        "redis:/user:hunter2@127.0.0.1:6379",
        "http://user:hunter2@127.0.0.1:6379",
        "mysql://user:hunter2@127.0.0.1/db",
        "mem:",
        "memory:hunter2",
        "memory://hunter2",
        "memory?hunter2",
        "memories",
        "redis://",
        "redis://user:hunter2@",
        "redis://user:hunter2@:6379",
        "redis://user:hunter2@127.0.0.1:port",
        "redis://user:hunter2@127.0.0.1:99999",
        "redis://user:hunter2@127.0.0.1:6379/database",
        "redis://user:hunter2@127.0.0.1:6379/1/2",
        "redis://user:hunter2@127.0.0.1:6379/-1",
        "redis://user:hunter2@127.0.0.1:6379?protocol=hunter2",
        "redis://user:hunter2#@127.0.0.1:6379",
        "redis://user:hunter2/@127.0.0.1:6379",
        "redis://user:hunter2?@127.0.0.1:6379",
        "redis://user:hunter2%ff@127.0.0.1:6379",
        "redis://user:hunter2@127 .0.0.1:6379",
        "redis://user:hunter2@[::1:6379",
        "redis-sentinel://user:hunter2@127.0.0.1:26379/primary",
        "redis+cluster:user:hunter2@127.0.0.1:6379",
        "cluster://user:hunter2@127.0.0.1:6379",
    ] {
        let error = within(Duration::ZERO, LockClient::connect(url))
            .await
            .expect_err(url);
        assert!(
            !format!("{error} {error:?}").contains("hunter2"),
            "{url:?}: {error:?}"
        );
        let right = ["redis://user:password@host:6379/0"];
        assert_says(&error, LockErrorKind::InvalidUrl, &right);
    }
}

/// The redis crate takes one of them for leave not to check certificates.
#[tokio::test]
async fn a_url_with_a_fragment_is_refused() {
    for url in [
        "rediss://127.0.0.1:6379#insecure",
        "rediss://127.0.0.1:6379/0?protocol=resp3#insecure",
        "rediss+cluster://127.0.0.1:6379#insecure",
        "rediss+sentinel://127.0.0.1:26379/primary#insecure",
        "redlock:rediss://a#insecure,rediss://b#insecure,rediss://c#insecure",
    ] {
        let error = LockClient::connect(url).await.expect_err(url);
        assert_eq!(error.kind(), LockErrorKind::InvalidUrl, "{error}");
        assert!(error.to_string().contains("fragment"), "{url}: {error}");
    }
}
