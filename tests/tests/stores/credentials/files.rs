//! Certificates and passwords in files that are replaced.

use std::{fs, path::Path};

use lock_runtime::{LockClient, LockClientBuilder, RedisOptions};
use lock_tests::{
    RedisServer,
    place::{LONG, begun, in_time},
};

use super::{ALL, outlive, rotate};

async fn tls_server() -> RedisServer {
    let builder = RedisServer::builder().tls();
    builder.arg("--tls-auth-clients", "yes").start().await
}

/// Writes the certificates for clients of a server.
fn write(directory: &Path, server: &RedisServer) {
    let own = server.client_identity();
    for (name, text) in [
        ("ca.pem", server.ca_pem()),
        ("own.pem", &own.certificate),
        ("own.key", &own.key),
    ] {
        fs::write(directory.join(name), text).unwrap();
    }
}

/// The files of a server with TLS.
async fn files_of(server: &RedisServer) -> Vec<String> {
    let mut files = Vec::new();
    for name in ["tls-ca-cert-file", "tls-cert-file", "tls-key-file"] {
        files.extend(server.query::<Vec<String>>(&["CONFIG", "GET", name]).await);
    }
    files
}

#[tokio::test]
async fn certificates_are_read_for_each_connection() {
    in_time(async {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let (server, other) = tokio::join!(tls_server(), tls_server());
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), &server);
        let file = |name: &str| directory.path().join(name);
        let options = RedisOptions::new()
            .root_certificate_file(file("ca.pem"))
            .client_certificate_files(file("own.pem"), file("own.key"));
        let builder = LockClient::builder().redis(options);
        let locks = builder.connect(&server.tls_url()).await.unwrap();
        let held = locks.exclusive("held").acquire().await.unwrap();

        // The server gets another authority, and a certificate of it.
        let files = files_of(&other).await;
        let mut command = vec!["CONFIG", "SET"];
        command.extend(files.iter().map(String::as_str));
        server.command(&command).await;
        server.command(&["CLIENT", "KILL", "USER", "default"]).await;
        let request = locks.exclusive("k").wait(LONG).acquire();
        let waiting = tokio::spawn(begun(request).await);
        let at_once = locks.exclusive("k").no_wait().acquire().await;
        let error = lock_tests::chain(&at_once.unwrap_err());
        assert!(error.contains("certificate"), "{error}");

        // A moment at which the files do not fit is survived as well.
        fs::write(file("own.key"), "").unwrap();
        let at_once = locks.exclusive("k").no_wait().acquire().await;
        assert!(at_once.is_err());
        write(directory.path(), &other);
        waiting.await.unwrap().unwrap().release().await.unwrap();
        held.release().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_password_file_of_the_environment_is_read_for_each_connection() {
    in_time(async {
        let server = RedisServer::builder().user("app", "one", ALL).start().await;
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(&file, "one\n").unwrap();
        let url = server.url().replace("://", "://app@");
        let (builder, url) = LockClientBuilder::from_env_with([
            ("LOCK_URL", url),
            ("LOCK_PASSWORD_FILE", file.path().display().to_string()),
        ])
        .unwrap();
        let locks = builder.connect(&url).await.unwrap();
        let refuse = async || rotate([&server], "two").await;
        outlive(&locks, refuse, async || fs::write(&file, "two\n").unwrap()).await;
    })
    .await;
}
