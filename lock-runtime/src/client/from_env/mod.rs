//! A client that is configured by environment variables.

#[cfg(all(test, feature = "redis"))]
#[path = "../../../fuzz/variables.rs"]
mod fuzz;

use std::{collections::BTreeMap, ffi::OsString, str::FromStr, time::Duration};

#[cfg(any(feature = "redis", feature = "postgres", feature = "etcd"))]
use super::scheme::{Scheme, names_a_server};
use super::{LockClient, LockClientBuilder, scheme::is_tls_of_redis};
use crate::{
    error::{LockError, LockErrorKind},
    request::spec::{LockSpec, OnLost, parse_duration},
};

/// An environment variable that [`LockClient::from_env`] reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
#[non_exhaustive]
pub struct EnvVariable {
    /// The name.
    pub name: &'static str,
    /// The meaning, with the default.
    pub meaning: &'static str,
    /// A valid value.
    pub example: &'static str,
}

/// Defines [`VARIABLES`], and the same as a table in Markdown.
macro_rules! variables {
    ($($name:literal, $meaning:literal, $example:literal;)*) => {
        const VARIABLES: &[EnvVariable] = &[$(EnvVariable {
            name: $name,
            meaning: $meaning,
            example: $example,
        }),*];

        macro_rules! table_of_variables {
            () => {
                concat!(
                    "| Variable | Meaning and default | Example |\n|---|---|---|\n",
                    $("| `", $name, "` | ", $meaning, " | `", $example, "` |\n"),*
                )
            };
        }
    };
}

variables! {
    "LOCK_URL", "the store; required", "redis://127.0.0.1:6379/0";
    "LOCK_NAMESPACE", "prefix of all names: `lock`", "shop";
    "LOCK_IDENTITY", "name of this client", "orders@web-3";
    "LOCK_LEASE", "default lease: 30s", "10s";
    "LOCK_WAIT", "default wait: 10s", "1m 30s";
    "LOCK_NO_WAIT", "requests do not wait", "true";
    "LOCK_RENEW", "whether leases are renewed: true", "false";
    "LOCK_REENTRANT", "whether locks are re-entrant: false", "true";
    "LOCK_STRICT_ORDER", "processes take strict turns: false", "true";
    "LOCK_MIN_HOLD", "default `min_hold`: none", "500ms";
    "LOCK_MAX_HOLD", "default `max_hold`: none", "1h";
    "LOCK_ON_LOST", "work whose lock is lost: cancel, error or ignore", "error";
    "LOCK_MAX_WAITERS", "waiting requests per key: 10000", "100";
    "LOCK_MAX_WAITERS_IN_ALL", "waiting requests in all: 100000", "5000";
    "LOCK_UNAVAILABLE_AFTER", "outage after which requests fail at once: none", "2s";
    "LOCK_CONFIRM_GRANTS", "whether grants by message are confirmed: false", "true";
    "LOCK_KEEP_FENCES_FOR", "life of fencing tokens after a release: 1d", "5m";
    "LOCK_MIN_REPLICAS", "replicas that have a grant: none", "1";
    "LOCK_REPLICA_TIMEOUT", "longest wait for replicas: 100ms", "50ms";
    "LOCK_LONGEST_LEASE", "longest lease with Redlock: 30s", "1m";
    "LOCK_PASSWORD_FILE", "file of the password for the servers", "/run/secrets/redis";
    "LOCK_SENTINEL_PASSWORD_FILE", "the same for the Sentinels", "/run/secrets/sentinel";
    "LOCK_ROOT_CERTIFICATE", "file of trusted authorities (PEM)", "/etc/ca.pem";
    "LOCK_CLIENT_CERTIFICATE", "file of our certificate (PEM)", "/etc/client.pem";
    "LOCK_CLIENT_KEY", "file of its private key (PEM)", "/etc/client.key";
}

const PREFIX: &str = "LOCK_";

impl LockClient {
    /// Connects to the store that the environment variables name, with the settings that they
    /// contain.
    ///
    #[doc = table_of_variables!()]
    ///
    /// The URL is described at [`connect`](Self::connect). Files are read now, and at each attempt
    /// to connect, so that they can be replaced. An empty variable counts as unset. A
    /// variable whose name resembles one of these is logged as a warning, with the name that was
    /// probably meant. To set more in code, use [`LockClientBuilder::from_env`].
    ///
    /// ```no_run
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lock_runtime::LockError> {
    /// use lock_runtime::LockClient;
    ///
    /// // LOCK_URL=redis://127.0.0.1/ LOCK_NAMESPACE=shop LOCK_WAIT=2s
    /// let locks = LockClient::from_env().await?;
    /// # drop(locks); Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `InvalidUrl` if `LOCK_URL` is missing or invalid, `InvalidSpec` for another invalid value,
    /// and the errors of [`connect`](Self::connect). The message names the variable. It never
    /// contains the URL, which may have a password.
    ///
    /// # Cancellation
    /// Dropping the future closes the connection.
    pub async fn from_env() -> Result<Self, LockError> {
        let settings = Settings::read(std::env::vars_os())?;
        let connected = settings.builder.connect(&settings.url).await;
        connected.map_err(|error| blame(error, &settings.set))
    }
}

impl LockClientBuilder {
    /// The environment variables that [`from_env`](Self::from_env) reads, for a help text.
    #[doc(hidden)]
    pub const ENV: &'static [EnvVariable] = VARIABLES;

    /// Reads the [environment variables](LockClient::from_env) without connecting. Returns a
    /// builder, whose settings code can override, and the URL.
    ///
    /// ```no_run
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lock_runtime::LockError> {
    /// use lock_runtime::LockClientBuilder;
    ///
    /// let (builder, url) = LockClientBuilder::from_env()?;
    /// let locks = builder.max_waiters(100).connect(&url).await?;
    /// # drop(locks); Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `InvalidUrl` if `LOCK_URL` is missing, and `InvalidSpec` for an invalid value. The message
    /// names the variable.
    pub fn from_env() -> Result<(Self, String), LockError> {
        Self::from_env_with([])
    }

    /// Same as [`from_env`](Self::from_env), with values that replace those of the environment,
    /// such as from the options of a command line.
    ///
    /// # Errors
    /// Same as [`from_env`](Self::from_env).
    pub fn from_env_with(
        values: impl IntoIterator<Item = (&'static str, String)>,
    ) -> Result<(Self, String), LockError> {
        let given = values.into_iter();
        let given = given.map(|(name, value)| (name.into(), value.into()));
        let settings = Settings::read(std::env::vars_os().chain(given))?;
        Ok((settings.builder, settings.url))
    }
}

/// The settings in the environment.
#[derive(Debug)]
struct Settings {
    builder: LockClientBuilder,
    url: String,
    /// The variables that are set.
    set: Vec<&'static str>,
}

/// The known variables that are not empty.
struct Values(BTreeMap<&'static str, String>);

impl Settings {
    fn read(vars: impl IntoIterator<Item = (OsString, OsString)>) -> Result<Self, LockError> {
        let values = Values::read(vars)?;
        let set: Vec<_> = values.0.keys().copied().collect();
        let Some(url) = values.0.get("LOCK_URL").cloned() else {
            let message = "LOCK_URL is not set; set it to the URL of the store, such as \
                           redis://127.0.0.1:6379/0, or memory: for tests";
            return Err(LockError::new(LockErrorKind::InvalidUrl, message));
        };
        let mut builder = LockClientBuilder::default().defaults(values.defaults()?);
        if let Some(namespace) = values.0.get("LOCK_NAMESPACE") {
            #[cfg(any(feature = "redis", feature = "postgres", feature = "etcd"))]
            crate::store::namespace::check_namespace(namespace)
                .map_err(|error| error.with_context("LOCK_NAMESPACE"))?;
            builder.namespace.clone_from(namespace);
        }
        if let Some(max_waiters) = values.number("LOCK_MAX_WAITERS")? {
            builder = builder.max_waiters(max_waiters);
        }
        if let Some(max_waiters) = values.number("LOCK_MAX_WAITERS_IN_ALL")? {
            builder = builder.max_waiters_in_all(max_waiters);
        }
        if let Some(after) = values.duration("LOCK_UNAVAILABLE_AFTER")? {
            builder = builder.unavailable_after(after);
        }
        if values.flag("LOCK_CONFIRM_GRANTS")? == Some(true) {
            builder = builder.confirm_grants();
        }
        if let Some(time) = values.duration("LOCK_KEEP_FENCES_FOR")? {
            builder = builder.keep_fences_for(time);
        }
        if let Some(identity) = values.0.get("LOCK_IDENTITY") {
            builder = builder.identity(identity);
        }
        let builder = values.redis(builder)?;
        let builder = values.passwords(builder, &url)?;
        if let Some(name) = CERTIFICATES.iter().find(|name| set.contains(name))
            && !is_tls_of_redis(&url)
        {
            let complaint = "it has no effect, as LOCK_URL does not begin with rediss:// (or ask for \
                             sentinel_tls=true)";
            return Err(invalid(name, complaint));
        }
        builder.check().map_err(|error| blame(error, &set))?;
        Ok(Self { builder, url, set })
    }
}

impl Values {
    fn read(vars: impl IntoIterator<Item = (OsString, OsString)>) -> Result<Self, LockError> {
        let mut values = BTreeMap::new();
        for (name, value) in vars {
            let Some(name) = name.to_str().filter(|name| name.starts_with(PREFIX)) else {
                continue;
            };
            let Some(known) = VARIABLES.iter().find(|known| known.name == name) else {
                if let Some(meant) = nearest(name) {
                    tracing::warn!(
                        name,
                        meant,
                        "unknown environment variable; did you mean another one?"
                    );
                }
                continue;
            };
            let value = value
                .into_string()
                .map_err(|_| invalid(known.name, "the value is not valid UTF-8"))?;
            if !value.trim().is_empty() {
                values.insert(known.name, value.trim().to_owned());
            }
        }
        Ok(Self(values))
    }

    fn defaults(&self) -> Result<LockSpec, LockError> {
        let mut spec = LockSpec::exclusive();
        for (name, set) in [
            ("LOCK_LEASE", LockSpec::lease as fn(_, _) -> _),
            ("LOCK_WAIT", LockSpec::wait),
            ("LOCK_MIN_HOLD", LockSpec::min_hold),
            ("LOCK_MAX_HOLD", LockSpec::max_hold),
        ] {
            if let Some(duration) = self.duration(name)? {
                let alone = set(LockSpec::exclusive(), duration);
                alone.check().map_err(|error| error.with_context(name))?;
                spec = set(spec, duration);
            }
        }
        for (name, yes, no) in [
            (
                "LOCK_RENEW",
                LockSpec::renew as fn(_) -> _,
                LockSpec::no_renew as fn(_) -> _,
            ),
            (
                "LOCK_REENTRANT",
                LockSpec::reentrant,
                LockSpec::no_reentrant,
            ),
            (
                "LOCK_STRICT_ORDER",
                LockSpec::strict_order,
                LockSpec::no_strict_order,
            ),
        ] {
            spec = match self.flag(name)? {
                Some(true) => yes(spec),
                Some(false) => no(spec),
                None => spec,
            };
        }
        if let Some(text) = self.0.get("LOCK_ON_LOST") {
            let words = [OnLost::Cancel, OnLost::Error, OnLost::Ignore];
            let Some(on_lost) = words.into_iter().find(|it| it.as_str() == text) else {
                let complaint = format!("{text:?} is not cancel, error or ignore");
                return Err(invalid("LOCK_ON_LOST", &complaint));
            };
            spec = spec.on_lost(on_lost);
        }
        match self.flag("LOCK_NO_WAIT")? {
            Some(true) if self.0.contains_key("LOCK_WAIT") => Err(invalid(
                "LOCK_NO_WAIT",
                "LOCK_WAIT sets the same option: leave one out",
            )),
            Some(true) => Ok(spec.no_wait()),
            Some(false) | None => Ok(spec),
        }
    }

    /// Sets the files of passwords.
    #[cfg(any(feature = "redis", feature = "postgres", feature = "etcd"))]
    fn passwords(
        &self,
        mut builder: LockClientBuilder,
        url: &str,
    ) -> Result<LockClientBuilder, LockError> {
        use crate::client::credentials::{in_file, password_in};
        for name in PASSWORD_FILES {
            let Some(path) = self.0.get(name) else {
                continue;
            };
            let is_of_sentinels = name == OF_SENTINELS;
            let is_used = match is_of_sentinels {
                true => url.contains("+sentinel:"),
                // The user of ZooKeeper is that of the URL.
                false => names_a_server(url) && !matches!(Scheme::of(url), Ok(Scheme::ZooKeeper)),
            };
            if !is_used {
                let complaint = "it has no effect, as LOCK_URL names no such server";
                return Err(invalid(name, complaint));
            }
            password_in(path.as_ref()).map_err(|complaint| invalid(name, &complaint))?;
            #[cfg(feature = "records")]
            {
                builder.password_file = Some(name);
            }
            #[cfg(feature = "redis")]
            {
                let options = builder.redis;
                builder.redis = match is_of_sentinels {
                    true => options.sentinel_credentials(in_file(path)),
                    false => options.credentials(in_file(path)),
                };
            }
            #[cfg(feature = "postgres")]
            if !is_of_sentinels {
                builder.postgres = builder.postgres.credentials(in_file(path));
            }
            #[cfg(feature = "etcd")]
            if !is_of_sentinels {
                builder.etcd = builder.etcd.credentials(in_file(path));
            }
        }
        Ok(builder)
    }

    #[cfg(not(any(feature = "redis", feature = "postgres", feature = "etcd")))]
    fn passwords(
        &self,
        builder: LockClientBuilder,
        _: &str,
    ) -> Result<LockClientBuilder, LockError> {
        self.refuse(&PASSWORD_FILES, "redis")?;
        Ok(builder)
    }

    #[cfg(feature = "redis")]
    fn redis(&self, mut builder: LockClientBuilder) -> Result<LockClientBuilder, LockError> {
        use crate::store::redis::RedisOptions;
        let mut options = builder.redis;
        let timeout = self.duration("LOCK_REPLICA_TIMEOUT")?;
        match (self.number("LOCK_MIN_REPLICAS")?, timeout) {
            (Some(replicas), timeout) => {
                options = options.min_replicas(
                    replicas,
                    timeout.unwrap_or(RedisOptions::DEFAULT_REPLICA_TIMEOUT),
                );
                options
                    .check()
                    .map_err(|error| error.with_context("LOCK_REPLICA_TIMEOUT"))?;
            }
            (None, Some(_)) => {
                let complaint = "it has no effect without LOCK_MIN_REPLICAS";
                return Err(invalid("LOCK_REPLICA_TIMEOUT", complaint));
            }
            (None, None) => {}
        }
        if let Some(longest) = self.duration("LOCK_LONGEST_LEASE")? {
            let alone = RedisOptions::new().longest_lease(longest);
            alone
                .check()
                .map_err(|error| error.with_context("LOCK_LONGEST_LEASE"))?;
            options = options.longest_lease(longest);
        }
        builder.redis = self.certificates(options)?;
        Ok(builder)
    }

    #[cfg(not(feature = "redis"))]
    fn redis(&self, builder: LockClientBuilder) -> Result<LockClientBuilder, LockError> {
        let of_redis = [
            "LOCK_MIN_REPLICAS",
            "LOCK_REPLICA_TIMEOUT",
            "LOCK_LONGEST_LEASE",
        ];
        self.refuse(&of_redis, "redis")?;
        self.refuse(&CERTIFICATES, "redis-rustls")?;
        Ok(builder)
    }

    #[cfg(feature = "redis-rustls")]
    fn certificates(
        &self,
        mut options: crate::RedisOptions,
    ) -> Result<crate::RedisOptions, LockError> {
        let [root, certificate, key] = CERTIFICATES;
        if let Some(path) = self.0.get(root) {
            options = options.root_certificate_file(path);
            options.check().map_err(|error| error.with_context(root))?;
        }
        match (self.0.get(certificate), self.0.get(key)) {
            (Some(own), Some(private)) => {
                options = options.client_certificate_files(own, private);
                let names = "LOCK_CLIENT_CERTIFICATE, LOCK_CLIENT_KEY";
                options.check().map_err(|error| error.with_context(names))?;
            }
            (Some(_), None) => {
                return Err(invalid(key, "LOCK_CLIENT_CERTIFICATE needs it as well"));
            }
            (None, Some(_)) => {
                return Err(invalid(certificate, "LOCK_CLIENT_KEY needs it as well"));
            }
            (None, None) => {}
        }
        Ok(options)
    }

    #[cfg(all(feature = "redis", not(feature = "redis-rustls")))]
    fn certificates(&self, options: crate::RedisOptions) -> Result<crate::RedisOptions, LockError> {
        self.refuse(&CERTIFICATES, "redis-rustls")?;
        Ok(options)
    }

    /// Refuses variables that need a feature.
    #[cfg(not(feature = "redis-rustls"))]
    fn refuse(&self, names: &[&'static str], feature: &str) -> Result<(), LockError> {
        match names.iter().find(|name| self.0.contains_key(*name)) {
            Some(name) => {
                let complaint = format!(
                    "it needs a part that is not compiled in; enable the feature `{feature}` of lock-runtime"
                );
                Err(invalid(name, &complaint))
            }
            None => Ok(()),
        }
    }

    fn duration(&self, name: &'static str) -> Result<Option<Duration>, LockError> {
        let parsed = self.0.get(name).map(|text| parse_duration(text));
        parsed
            .transpose()
            .map_err(|complaint| invalid(name, &complaint))
    }

    fn number<T: FromStr>(&self, name: &'static str) -> Result<Option<T>, LockError> {
        let parsed = self.0.get(name).map(|text| {
            let complaint = || format!("{text:?} is not a number in range: write 100 or the like");
            text.parse().map_err(|_| invalid(name, &complaint()))
        });
        parsed.transpose()
    }

    fn flag(&self, name: &'static str) -> Result<Option<bool>, LockError> {
        match self.0.get(name).map(String::as_str) {
            Some("true" | "1") => Ok(Some(true)),
            Some("false" | "0") => Ok(Some(false)),
            Some(other) => Err(invalid(name, &format!("{other:?} is not true or false"))),
            None => Ok(None),
        }
    }
}

const CERTIFICATES: [&str; 3] = [
    "LOCK_ROOT_CERTIFICATE",
    "LOCK_CLIENT_CERTIFICATE",
    "LOCK_CLIENT_KEY",
];

const OF_SENTINELS: &str = "LOCK_SENTINEL_PASSWORD_FILE";
const PASSWORD_FILES: [&str; 2] = ["LOCK_PASSWORD_FILE", OF_SENTINELS];

fn invalid(name: &str, complaint: &str) -> LockError {
    LockError::new(LockErrorKind::InvalidSpec, format!("{name}: {complaint}"))
}

/// Names the variables that an error is about: that of the URL, or those of its options.
fn blame(error: LockError, set: &[&'static str]) -> LockError {
    let named = match error.kind() {
        LockErrorKind::InvalidUrl => &["url"],
        _ => error.settings(),
    };
    let is_named = |name: &&str| {
        let option = name[PREFIX.len()..].to_ascii_lowercase();
        named.contains(&&*option)
    };
    let names: Vec<_> = set.iter().copied().filter(is_named).collect();
    match names.is_empty() {
        true => error,
        false => error.with_context(&names.join(", ")),
    }
}

/// Returns the variable that was probably meant by `name`.
fn nearest(name: &str) -> Option<&'static str> {
    let name = name.strip_prefix(PREFIX)?;
    let near = VARIABLES.iter().map(|known| {
        let option = &known.name[PREFIX.len()..];
        (
            strsim::damerau_levenshtein(name, option),
            option.len(),
            known.name,
        )
    });
    near.filter(|(distance, length, _)| *distance <= (length / 3).max(1))
        .min()
        .map(|(_, _, known)| known)
}

#[cfg(test)]
mod tests;
