//! The serialized form of a [`LockSpec`] (feature `serde`). It has the names and values of a
//! policy file of lock-tower.

use std::{num::NonZeroU32, time::Duration};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use super::{LockSpec, MaxHold, Mode, OnLost, Wait, parse_duration};

#[derive(Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Fields {
    #[serde(skip_serializing_if = "Option::is_none")]
    mode: Option<Sharing>,
    #[serde(skip_serializing_if = "Option::is_none")]
    permits: Option<NonZeroU32>,
    #[serde(with = "text", skip_serializing_if = "Option::is_none")]
    lease: Option<Duration>,
    #[serde(with = "text", skip_serializing_if = "Option::is_none")]
    wait: Option<Duration>,
    #[serde(skip_serializing_if = "Option::is_none")]
    no_wait: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    renew: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reentrant: Option<bool>,
    #[serde(with = "text", skip_serializing_if = "Option::is_none")]
    min_hold: Option<Duration>,
    #[serde(with = "text", skip_serializing_if = "Option::is_none")]
    max_hold: Option<Duration>,
    #[serde(skip_serializing_if = "Option::is_none")]
    no_max_hold: Option<bool>,
    #[serde(with = "text", skip_serializing_if = "Option::is_none")]
    retain: Option<Duration>,
    #[serde(skip_serializing_if = "Option::is_none")]
    strict_order: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_waiters: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    on_lost: Option<OnLost>,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Sharing {
    Exclusive,
    Shared,
}

impl From<LockSpec> for Fields {
    fn from(spec: LockSpec) -> Self {
        let (mode, permits) = match spec.mode {
            Mode::Exclusive => (Some(Sharing::Exclusive), None),
            Mode::Shared => (Some(Sharing::Shared), None),
            Mode::Permits(permits) => (None, Some(permits)),
        };
        let (wait, no_wait) = match spec.wait {
            None => (None, None),
            Some(Wait::No) => (None, Some(true)),
            Some(Wait::AtMost(wait)) => (Some(wait), None),
        };
        let (max_hold, no_max_hold) = match spec.max_hold {
            None => (None, None),
            Some(MaxHold::No) => (None, Some(true)),
            Some(MaxHold::AtMost(max_hold)) => (Some(max_hold), None),
        };
        Self {
            mode,
            permits,
            lease: spec.lease,
            wait,
            no_wait,
            renew: spec.renew,
            reentrant: spec.reentrant,
            min_hold: spec.min_hold,
            max_hold,
            no_max_hold,
            retain: spec.retain,
            strict_order: spec.strict_order,
            max_waiters: spec.max_waiters,
            on_lost: spec.on_lost,
        }
    }
}

impl TryFrom<Fields> for LockSpec {
    type Error = String;

    fn try_from(fields: Fields) -> Result<Self, String> {
        let twice = |one, other| {
            let message = format!("`{one}` and `{other}` set the same option: leave one out");
            Err(message)
        };
        let spec = Self {
            mode: match (fields.mode, fields.permits) {
                (Some(_), Some(_)) => return twice("mode", "permits"),
                (_, Some(permits)) => Mode::Permits(permits),
                (Some(Sharing::Shared), None) => Mode::Shared,
                (Some(Sharing::Exclusive) | None, None) => Mode::Exclusive,
            },
            lease: fields.lease,
            wait: match (fields.wait, fields.no_wait) {
                (Some(_), Some(_)) => return twice("wait", "no_wait"),
                (None, Some(false)) => {
                    return Err("set the wait instead of `no_wait`, to \"2s\" for example".into());
                }
                (None, Some(true)) => Some(Wait::No),
                (wait, None) => wait.map(Wait::AtMost),
            },
            renew: fields.renew,
            strict_order: fields.strict_order,
            reentrant: fields.reentrant,
            min_hold: fields.min_hold,
            max_hold: match (fields.max_hold, fields.no_max_hold) {
                (Some(_), Some(_)) => return twice("max_hold", "no_max_hold"),
                (None, Some(false)) => {
                    return Err(
                        "set the max_hold instead of `no_max_hold`, to \"1m\" for example".into(),
                    );
                }
                (None, Some(true)) => Some(MaxHold::No),
                (max_hold, None) => max_hold.map(MaxHold::AtMost),
            },
            retain: fields.retain,
            max_waiters: fields.max_waiters,
            on_lost: fields.on_lost,
        };
        spec.check().map_err(|error| error.to_string())?;
        Ok(spec)
    }
}

/// Durations as text, such as `"1m 30s"`.
mod text {
    use super::*;

    pub(super) fn serialize<S: Serializer>(
        duration: &Option<Duration>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let text = duration.map(|duration| humantime::format_duration(duration).to_string());
        text.serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Duration>, D::Error> {
        let Some(text) = <Option<String>>::deserialize(deserializer)? else {
            return Ok(None);
        };
        parse_duration(&text).map(Some).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{FencingToken, LockKey};

    fn read(text: &str) -> serde_json::Result<LockSpec> {
        serde_json::from_str(text)
    }

    fn round_trip(spec: &LockSpec) {
        let text = serde_json::to_string(spec).unwrap();
        assert_eq!(read(&text).unwrap(), *spec, "{text}");
    }

    macro_rules! round_trips {
        (
            options { $( $(#[$doc:meta])* $option:ident($($arg:ident: $of:ty)?) { $($set:tt)* } )* }
            modes { $( $mode:ident($($count:ident: $of_count:ty)?) { $($text:tt)* } )* }
        ) => {
            $(
                $( let $arg = <$of as Sample>::SAMPLE; )?
                let spec = LockSpec::exclusive().$option($($arg)?);
                assert_ne!(spec, LockSpec::exclusive());
                round_trip(&spec);
            )*
            $(
                $( let $count = <$of_count as Sample>::SAMPLE; )?
                round_trip(&LockSpec::$mode($($count)?));
            )*
        };
    }

    trait Sample {
        const SAMPLE: Self;
    }

    impl Sample for Duration {
        const SAMPLE: Self = Duration::from_secs(7);
    }

    impl Sample for usize {
        const SAMPLE: Self = 7;
    }

    impl Sample for OnLost {
        const SAMPLE: Self = Self::Ignore;
    }

    impl Sample for NonZeroU32 {
        const SAMPLE: Self = NonZeroU32::MAX;
    }

    #[test]
    fn serialize_keeps_each_option_and_mode() {
        crate::__lock_options!(round_trips);
    }

    #[test]
    fn serialize_writes_the_names_of_a_policy_file() {
        let spec = LockSpec::shared()
            .lease(Duration::from_secs(90))
            .no_wait()
            .no_renew()
            .no_reentrant()
            .strict_order()
            .max_waiters(7)
            .on_lost(OnLost::Error);
        assert_eq!(
            serde_json::to_string(&spec).unwrap(),
            r#"{"mode":"shared","lease":"1m 30s","no_wait":true,"renew":false,"reentrant":false,"strict_order":true,"max_waiters":7,"on_lost":"error"}"#
        );
    }

    #[test]
    fn deserialize_accepts_all_spellings() {
        for (text, spec) in [
            ("{}", LockSpec::exclusive()),
            (r#"{"mode":"exclusive"}"#, LockSpec::exclusive()),
            (r#"{"mode":"shared"}"#, LockSpec::shared()),
            (r#"{"renew":false}"#, LockSpec::exclusive().no_renew()),
            (r#"{"renew":true}"#, LockSpec::exclusive().renew()),
            (
                r#"{"lease":"1500ms"}"#,
                LockSpec::exclusive().lease(Duration::from_millis(1_500)),
            ),
        ] {
            assert_eq!(read(text).unwrap(), spec, "{text}");
        }
    }

    #[test]
    fn deserialize_refuses_bad_input_with_the_reason() {
        for (text, words) in [
            (r#"{"leese":"1s"}"#, "unknown field `leese`"),
            (
                r#"{"mode":"read"}"#,
                "unknown variant `read`, expected `exclusive` or `shared`",
            ),
            (r#"{"mode":"shared","permits":3}"#, "leave one out"),
            (r#"{"permits":0}"#, "nonzero"),
            (r#"{"wait":"1s","no_wait":true}"#, "leave one out"),
            (r#"{"no_wait":false}"#, "set the wait instead"),
            (r#"{"no_renew":true}"#, "unknown field `no_renew`"),
            (r#"{"lease":30}"#, "expected a string"),
            (r#"{"lease":"30"}"#, "is not a duration"),
            (r#"{"lease":"1ms"}"#, "100 ms to 24 h"),
            (r#"{"max_waiters":-1}"#, "usize"),
            (r#"{"on_lost":"finish"}"#, "unknown variant `finish`"),
            (
                r#"{"min_hold":"2s","max_hold":"1s"}"#,
                "longer than the max_hold",
            ),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.to_string().contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn serialize_writes_keys_as_text_and_tokens_as_numbers() {
        let (key, text) = (LockKey::new("order:42").unwrap(), r#""order:42""#);
        assert_eq!(serde_json::to_string(&key).unwrap(), text);
        assert_eq!(serde_json::from_str::<LockKey>(text).unwrap(), key);
        let error = serde_json::from_str::<LockKey>(r#""permits:x""#).unwrap_err();
        assert!(error.to_string().contains("reserved"), "{error}");

        let token = FencingToken::new(7).unwrap();
        assert_eq!(serde_json::to_string(&token).unwrap(), "7");
        assert_eq!(serde_json::from_str::<FencingToken>("7").unwrap(), token);
        for text in ["0", "-1", "9223372036854775808", "\"7\""] {
            let read = serde_json::from_str::<FencingToken>(text);
            assert!(read.is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn serialize_keeps_each_duration(lease in 100_000_000_u64..=86_400_000_000_000) {
            round_trip(&LockSpec::exclusive().lease(Duration::from_nanos(lease)));
        }
    }
}
