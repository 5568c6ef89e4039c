//! A program that is `lockctl` for a database of a third party.

use std::{process::Stdio, time::Duration};

use lock_runtime::{LockClient, LockClientBuilder, LockErrorKind};
use lock_tests::files::open_files;

use super::{Ended, ended, with_signals};

async fn of_files(url: &str, arguments: &[&str]) -> Ended {
    let mut command = with_signals(env!("CARGO_BIN_EXE_lockctl-of-files"));
    let command = command.args(arguments).env("LOCK_URL", url);
    ended(command.stdin(Stdio::null())).await
}

#[tokio::test]
async fn a_scheme_of_a_third_party_has_every_command() {
    let directory = tempfile::tempdir().unwrap();
    let url = format!("files://{}", directory.path().display());
    let builder = || LockClient::builder().scheme("files", open_files);
    let locks = builder().connect(&url).await.unwrap();
    let request = locks.exclusive("order:1").lease(Duration::from_secs(3));
    let guard = request.acquire().await.unwrap();

    let listed = of_files(&url, &["ls"]).await;
    assert_eq!(listed.status, 0, "{listed:?}");
    assert!(listed.output.contains("order:1"), "{listed:?}");
    let command = ["run", "--key", "order:1", "--no-wait", "--", "true"];
    assert_eq!(of_files(&url, &command).await.status, 75);
    let elsewhere = of_files(&url, &["ls", "--namespace", "other"]).await;
    assert!(!elsewhere.output.contains("order:1"), "{elsewhere:?}");
    let healthy = of_files(&url, &["doctor"]).await;
    assert_eq!(healthy.status, 0, "{healthy:?}");

    let shown = of_files(&url, &["inspect", "order:1", "--json"])
        .await
        .json();
    let holder = shown["holders"][0]["id"].as_str().unwrap();
    let revoked = of_files(&url, &["revoke", "order:1", "--holder", holder]).await;
    assert_eq!(revoked.status, 0, "{revoked:?}");
    let lost = guard.lost().await.kind();
    assert!(matches!(lost, LockErrorKind::Lost(_)), "{lost:?}");
    assert_eq!(of_files(&url, &command).await.status, 0);
}

#[tokio::test]
async fn a_url_that_a_third_party_refuses_is_explained() {
    let builder = || LockClient::builder().scheme("files", open_files);
    let now = builder().connect("files:///gone/for/good").await;
    let later = builder().connect_lazy("files:///gone/for/good");
    for refused in [now, later] {
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), LockErrorKind::InvalidUrl);
        assert!(
            format!("{error:#}").contains("names no directory"),
            "{error:#}"
        );
    }
    let failed = of_files("memory-of-mine://a", &["ls"]).await;
    assert!(!failed.errors.contains("a new, empty store"), "{failed:?}");
    // Without the scheme.
    let unknown = LockClient::connect("files:///var/lib/locks").await;
    assert_eq!(unknown.unwrap_err().kind(), LockErrorKind::InvalidUrl);
    let failed = of_files("files:///gone/for/good", &["ls"]).await;
    assert_eq!(failed.status, 78, "{failed:?}");
    for name in ["", "files:", "files://", "4", "a b"] {
        let builder = LockClient::builder().scheme(name, open_files);
        let refused = builder.connect_lazy("memory:").unwrap_err();
        assert_eq!(refused.kind(), LockErrorKind::InvalidSpec, "{name:?}");
    }
    let values = [
        ("LOCK_URL", "files:///tmp".to_owned()),
        ("LOCK_PASSWORD_FILE", "Cargo.toml".to_owned()),
    ];
    let (given, url) = LockClientBuilder::from_env_with(values).unwrap();
    let refused = given.scheme("files", open_files).connect(&url).await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.kind(), LockErrorKind::InvalidSpec);
    assert!(
        refused.to_string().contains("LOCK_PASSWORD_FILE"),
        "{refused}"
    );
    for namespace in ["..", "a/b"] {
        builder()
            .namespace(namespace)
            .connect("files:///tmp")
            .await
            .unwrap_err();
    }
    // The settings of the builder are checked before.
    let invalid = builder().namespace("a:b").connect("files:///tmp").await;
    assert_eq!(invalid.unwrap_err().kind(), LockErrorKind::InvalidSpec);
}
