//! The URLs of databases, and what a server replies to a new connection.

use futures_util::FutureExt as _;
use tokio::io::{AsyncWriteExt as _, duplex};
use tokio_postgres::{Config, NoTls};

use super::{
    error::failed,
    settings::{PostgresOptions, Target},
};
use crate::fuzz::{SECRET, is_readable, refused_readably, with_password, within_bounds};

#[test]
fn urls() {
    bolero::check!().for_each(|input: &[u8]| {
        let Some(url) = with_password("postgres://", input) else {
            return;
        };
        // Those read files: of certificates that the URL names, or of the system's.
        if ["sslrootcert", "sslcert", "sslkey", "sslmode"]
            .iter()
            .any(|name| url.contains(name))
        {
            return;
        }
        within_bounds(input, || {
            let target = Target::new(&url, &PostgresOptions::new());
            let shown = match &target {
                Ok(target) => target.address(),
                Err(error) => format!("{error:?}"),
            };
            assert!(!shown.contains(SECRET), "{url:?}: {shown}");
            if let Some(target) = refused_readably(target) {
                is_readable(&target.address());
            }
        });
    });
}

/// Without a bound for the memory: the driver reserves what the header of a message announces.
#[test]
fn refusals() {
    bolero::check!().for_each(|input: &[u8]| {
        let (ours, mut theirs) = duplex(1 << 20);
        let sent = async { theirs.write_all(input).await.and(theirs.shutdown().await) };
        sent.now_or_never().unwrap().unwrap();
        let mut config = Config::new();
        config.user("app");
        if let Some(Err(error)) = config.connect_raw(ours, NoTls).now_or_never() {
            is_readable(&failed(&error));
        }
    });
}
