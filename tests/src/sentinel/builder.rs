//! What a set is started with, and its start.

use futures_util::future::{join_all, join3};

use super::SentinelSet;
use crate::{nodes::NODE_USER, redis_server};

/// The rhythm of a Sentinel. It is made for networks of thousands of nodes: left alone, they need several seconds to find
/// each other, and half a minute to trust their clock again after a SIGSTOP.
///
/// A replica is promoted only if its last INFO is not older than five ping periods, and comes once a second while its primary
/// is down: shorter ping periods find no good replica, again and again.
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

    /// The data nodes ask everybody for this password, each other and the Sentinels too.
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

    /// The Sentinels ask everybody for this password, each other too.
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

    /// All nodes and Sentinels speak TLS, with certificates of one authority, and name each other by their TLS ports: whoever
    /// asks a Sentinel learns those. The plain ports are open too.
    #[must_use]
    pub fn tls(mut self) -> Self {
        let tls = redis_server::Builder::default().tls();
        self.node = self.node.tls_of(&tls).arg("--tls-replication", "yes");
        self.sentinel = self.sentinel.tls_of(&tls).arg("--tls-replication", "yes");
        self.tls = true;
        self
    }

    /// Starts all, and waits until the Sentinels know the nodes and each other.
    ///
    /// # Panics
    /// When that isn't so within half a minute, with the logs.
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

        // Three that notice a death at the same moment all vote for themselves, and try again after twice the time-out. One
        // that notices later has voted for one of the others by then.
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
