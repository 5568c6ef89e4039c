//! Passwords and certificates that change while a client lives.

use std::{fs, path::Path, time::Duration};

use lock_runtime::{Credentials, LockClient, LockErrorKind, PostgresOptions};
use lock_tests::{
    PostgresServer, RedisServer,
    place::{LONG, begun, eventually, in_time},
};
use tokio_postgres::Client;

use super::waiters;
use crate::credentials::{Secret, app, outlive};

/// A server that requires passwords, with a role and its database.
async fn server() -> (PostgresServer, Client) {
    let builder = PostgresServer::builder().in_memory();
    let server = builder.password("secret").start().await;
    let admin = server.connect().await;
    for sql in [
        "create role app login password 'one'",
        "create database app owner app",
    ] {
        admin.batch_execute(sql).await.unwrap();
    }
    (server, admin)
}

fn url(server: &PostgresServer) -> String {
    format!("postgres://app@127.0.0.1:{}/app", server.port())
}

async fn rotate(admin: &Client, password: &str) {
    let alter = format!("alter role app password '{password}'");
    admin.batch_execute(&alter).await.unwrap();
    end_connections(admin).await;
}

async fn end_connections(admin: &Client) {
    let end = "select pg_terminate_backend(pid) from pg_stat_activity where usename = 'app'";
    admin.query(end, &[]).await.unwrap();
}

#[tokio::test]
async fn a_rotation_that_arrives_late_is_waited_for() {
    in_time(async {
        let ((server, admin), secret) = (server().await, Secret::new(app("one")));
        let options = PostgresOptions::new().credentials(secret.provide());
        let builder = LockClient::builder().postgres(options);
        let locks = builder.connect(&url(&server)).await.unwrap();
        let refuse = async || rotate(&admin, "two").await;
        outlive(&locks, refuse, async || secret.set(Ok(app("two")))).await;
        let of_the_url = server.url_as("app", "two", "app");
        let locks = LockClient::connect(&of_the_url).await.unwrap();
        let refuse = async || rotate(&admin, "three").await;
        outlive(&locks, refuse, async || rotate(&admin, "two").await).await;
    })
    .await;
}

#[tokio::test]
async fn connections_are_replaced_before_their_credentials_end() {
    in_time(async {
        let ((server, admin), secret) = (server().await, Secret::new(app("one")));
        let passing = |password| {
            let credentials = Credentials::new("app", password);
            Ok(credentials.valid_for(Duration::from_millis(300)))
        };
        secret.set(passing("one"));
        let options = PostgresOptions::new().credentials(secret.provide());
        let builder = LockClient::builder().postgres(options);
        let locks = builder.connect(&url(&server)).await.unwrap();
        let other = LockClient::connect(&server.url_as("app", "one", "app"))
            .await
            .unwrap();
        let held = other.exclusive("k").acquire().await.unwrap();
        let waiting = tokio::spawn(begun(locks.exclusive("k").wait(LONG).acquire()).await);
        waiters(&other, "k", 1).await;
        let listening = async || {
            let query = "select pid from pg_stat_activity where query like 'listen%'";
            let rows = admin.query(query, &[]).await.unwrap();
            rows.first().map(|row| row.get::<_, i32>(0))
        };
        eventually("it listens", async || listening().await.is_some()).await;
        let before = listening().await;
        eventually("another one listens", async || {
            // The calls use others, too, and none of them is refused.
            let guard = locks.exclusive("free").wait(LONG).acquire().await.unwrap();
            if let Err(error) = guard.release().await {
                // A new connection takes longer than a release waits where the machine is busy.
                assert_eq!(error.kind(), LockErrorKind::ReleaseUnknown, "{error:#}");
            }
            listening().await.is_some_and(|now| Some(now) != before)
        })
        .await;
        held.release().await.unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn certificates_are_read_for_each_connection() {
    in_time(async {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let builder = PostgresServer::builder().in_memory().tls();
        // Each of them has an authority of its own, with a certificate for clients.
        let (server, one, other) = tokio::join!(
            builder.start(),
            RedisServer::builder().tls().start(),
            RedisServer::builder().tls().start(),
        );
        let admin = server.connect().await;
        let setting = async |name: &str| {
            let row = admin.query_one(&format!("show {name}"), &[]).await.unwrap();
            row.get::<_, String>(0)
        };
        let trusted = Path::new(&setting("data_directory").await).join("clients.crt");
        let rules = "hostnossl all postgres 127.0.0.1/32 trust\n\
                     hostssl all app 127.0.0.1/32 trust clientcert=verify-ca\n";
        fs::write(setting("hba_file").await, rules).unwrap();
        let trust = async |authority: &RedisServer| {
            fs::write(&trusted, authority.ca_pem()).unwrap();
            for sql in [
                "alter system set ssl_ca_file = 'clients.crt'",
                "select pg_reload_conf()",
            ] {
                admin.batch_execute(sql).await.unwrap();
            }
        };
        for sql in ["create role app login", "create database app owner app"] {
            admin.batch_execute(sql).await.unwrap();
        }
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str| directory.path().join(name);
        fs::write(file("ca"), server.ca_pem()).unwrap();
        let write = |authority: &RedisServer| {
            fs::write(file("own"), &authority.client_identity().certificate).unwrap();
            fs::write(file("key"), &authority.client_identity().key).unwrap();
        };
        trust(&one).await;
        write(&one);
        let path = directory.path().display();
        let url = format!(
            "{}?sslmode=verify-full&sslrootcert={path}/ca&sslcert={path}/own&sslkey={path}/key",
            url(&server),
        );
        eventually("the server has read its settings", async || {
            LockClient::connect(&url).await.is_ok()
        })
        .await;
        let locks = LockClient::connect(&url).await.unwrap();
        let held = locks.exclusive("held").acquire().await.unwrap();

        trust(&other).await;
        eventually("it is refused", async || {
            end_connections(&admin).await;
            locks.exclusive("k").no_wait().acquire().await.is_err()
        })
        .await;
        let request = locks.exclusive("free").wait(LONG).acquire();
        let waiting = tokio::spawn(begun(request).await);
        write(&other);
        waiting.await.unwrap().unwrap().release().await.unwrap();
        held.release().await.unwrap();
    })
    .await;
}
