//! Settings and start of a set.

use futures_util::future::{join_all, join3};

use super::SentinelSet;
use crate::{nodes::NODE_USER, redis_server};

/// Timing of a Sentinel. The defaults are made for networks of thousands of nodes: with them,
/// Sentinels need several seconds to find each other, and half a minute to trust their clock again
/// after a SIGSTOP.
///
/// A replica is promoted only if its last INFO is not older than five ping periods, and INFO comes
/// once a second while the primary is down: with shorter ping periods the Sentinels often find no
/// suitable replica.
const RHYTHM: [&str; 12] = [
    "SENTINEL",
    "DEBUG",
    "info-period",
    "200",
    "ping-period",
    "400",
    "ask-period",
    "100",
    "publish-period",
    "200",
    "tilt-period",
    "1000",
];

/// Settings of a [`SentinelSet`] to be started.
#[derive(Clone, Debug, Default)]
pub struct Builder {
    node: redis_server::Builder,
    sentinel: redis_server::Builder,
    password: Option<String>,
    tls: bool,
}

impl Builder {
    /// An option of all data nodes, as [`redis_server::Builder::arg`].
    #[must_use]
    pub fn arg(mut self, name: &str, value: &str) -> Self {
        self.node = self.node.arg(name, value);
        self
    }

    /// Requires this password from all clients of the data nodes, including other nodes and the
    /// Sentinels.
    #[must_use]
    pub fn password(mut self, password: &str) -> Self {
        self.node = self
            .node
            .password(password)
            .user(NODE_USER, password, "~* &* +@all");
        self.node = self
            .node
            .args(["--masteruser", NODE_USER, "--masterauth", password]);
        self.password = Some(password.to_owned());
        self
    }

    /// Another user of the data nodes, as [`redis_server::Builder::user`].
    #[must_use]
    pub fn user(mut self, name: &str, password: &str, rules: &str) -> Self {
        self.node = self.node.user(name, password, rules);
        self
    }

    /// Requires this password from all clients of the Sentinels, including other Sentinels.
    #[must_use]
    pub fn sentinel_password(mut self, password: &str) -> Self {
        self.sentinel =
            self.sentinel
                .password(password)
                .args(["--sentinel", "sentinel-pass", password]);
        self
    }

    /// Another user of the Sentinels, as [`redis_server::Builder::user`].
    #[must_use]
    pub fn sentinel_user(mut self, name: &str, password: &str, rules: &str) -> Self {
        self.sentinel = self.sentinel.user(name, password, rules);
        self
    }

    /// Enables TLS on all nodes and Sentinels, with certificates of one authority. They address
    /// each other by their TLS ports, and the Sentinels return these to their clients. The plain
    /// ports stay open.
    #[must_use]
    pub fn tls(mut self) -> Self {
        let tls = redis_server::Builder::default().tls();
        self.node = self.node.tls_of(&tls).arg("--tls-replication", "yes");
        self.sentinel = self.sentinel.tls_of(&tls).arg("--tls-replication", "yes");
        self.tls = true;
        self
    }

    /// Starts all servers, and waits until the Sentinels know the nodes and each other.
    ///
    /// # Panics
    /// When they do not within half a minute, with the logs.
    pub async fn start(self) -> SentinelSet {
        let node = self.node.with_config_file();
        let master = node.clone().start().await;
        let port = if self.tls {
            master.tls_port()
        } else {
            master.port()
        }
        .to_string();

        let replica = node.args(["--replicaof", "127.0.0.1", &port]);
        let service = SentinelSet::SERVICE;
        let mut directives = vec![
            vec!["monitor", service, "127.0.0.1", &port, "2"],
            vec!["failover-timeout", service, "2000"],
            vec!["parallel-syncs", service, "1"],
        ];
        if let Some(password) = &self.password {
            directives.push(vec!["auth-user", service, NODE_USER]);
            directives.push(vec!["auth-pass", service, password]);
        }
        let sentinel = self.sentinel.sentinel().first_command(&RHYTHM);
        let sentinel = directives.into_iter().fold(sentinel, |sentinel, words| {
            sentinel.args(["--sentinel"]).args(words)
        });

        // Three Sentinels that notice a failure at the same moment all vote for themselves, and try
        // again after twice the time-out. One that notices later has voted for one of the others by
        // then.
        let sentinels = join_all([1, 1, 2].map(|times| {
            let down_after = (SentinelSet::DOWN_AFTER * times).as_millis().to_string();
            sentinel
                .clone()
                .args([
                    "--sentinel",
                    "down-after-milliseconds",
                    service,
                    &down_after,
                ])
                .start()
        }));
        let (second, third, sentinels) =
            join3(replica.clone().start(), replica.start(), sentinels).await;
        let sentinels = sentinels.try_into().expect("three were started");
        let set = SentinelSet {
            nodes: [master, second, third],
            sentinels,
            tls: self.tls,
        };
        set.settled().await;
        set
    }
}
