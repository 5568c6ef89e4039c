use super::*;

fn examined() -> Examined {
    Examined {
        server: ServerHealth::new("a"),
        findings: Vec::new(),
        slots: None,
    }
}

fn codes(examined: &Examined) -> Vec<&'static str> {
    examined
        .findings
        .iter()
        .map(|finding| finding.code)
        .collect()
}

#[test]
fn a_clock_that_differs_is_reported_beyond_the_round_trip() {
    for (difference, is_reported) in [(0.9, false), (-0.9, false), (1.1, true), (-3600.0, true)] {
        let mut examined = examined();
        examined.judge_clock(difference);
        assert_eq!(examined.server.clock_difference, Some(difference));
        assert_eq!(!examined.findings.is_empty(), is_reported, "{difference}");
    }
    let mut slow = examined();
    slow.server.round_trip = Some(Duration::from_millis(500));
    slow.judge_clock(1.2);
    assert!(slow.findings.is_empty(), "it may be the way of the reply");
}

#[test]
fn the_findings_follow_the_info() {
    for (info, kind, required, expected) in [
        (
            "redis_version:7.0.15\r\nrole:master\r\n",
            Kind::Primary,
            None,
            &[][..],
        ),
        ("role:slave\r\n", Kind::Primary, None, &["read_only"]),
        (
            "role:master\r\ncluster_enabled:1\r\n",
            Kind::Primary,
            None,
            &["cluster_node"],
        ),
        (
            "role:master\r\ncluster_enabled:1\r\n",
            Kind::Node,
            None,
            &[],
        ),
        (
            "role:master\r\nloading:1\r\n",
            Kind::Primary,
            None,
            &["loading"],
        ),
        (
            "maxmemory_policy:volatile-lru\r\n",
            Kind::Primary,
            None,
            &["eviction"],
        ),
        (
            "used_memory:91\r\nmaxmemory:100\r\n",
            Kind::Primary,
            None,
            &["memory"],
        ),
        (
            "used_memory:91\r\nmaxmemory:0\r\n",
            Kind::Primary,
            None,
            &[],
        ),
        (
            "aof_last_write_status:err\r\n",
            Kind::Primary,
            None,
            &["persistence"],
        ),
        (
            "connected_slaves:1\r\n",
            Kind::Primary,
            Some(2),
            &["too_few_replicas"],
        ),
        ("connected_slaves:2\r\n", Kind::Primary, Some(2), &[]),
        ("connected_slaves:0\r\n", Kind::Node, None, &["no_replica"]),
        (
            "redis_version:6.2.1\r\n",
            Kind::Node,
            None,
            &["old_version"],
        ),
        (
            "redis_version:6.2.1\r\nvalkey_version:8.1.1\r\n",
            Kind::Node,
            None,
            &[],
        ),
    ] {
        let mut examined = examined();
        examined.judge_info(&Info(info.into()), (kind, false), required);
        assert_eq!(codes(&examined), expected, "{info}");
    }
    // A primary that Sentinels watch.
    for (replicas, expected) in [(0, &["no_replica"][..]), (1, &[])] {
        let mut examined = examined();
        let info = Info(format!("role:master\r\nconnected_slaves:{replicas}\r\n"));
        examined.judge_info(&info, (Kind::Primary, true), None);
        assert_eq!(codes(&examined), expected, "{replicas}");
    }
}

#[test]
fn a_refused_write_has_its_remedy() {
    for (code, expected) in [
        (
            "MISCONF Errors writing to the AOF file: No space",
            &["writes_refused"][..],
        ),
        ("OOM command not allowed", &["writes_refused"]),
        (
            "NOREPLICAS Not enough good replicas to write.",
            &["writes_refused"],
        ),
        ("CLUSTERDOWN The cluster is down", &["writes_refused"]),
        ("WRONGTYPE Operation against a key", &[]),
        ("NOPERM no", &[]),
        ("MASTERDOWN Link with MASTER is down", &["unavailable"]),
    ] {
        let reply = redis::parse_redis_value(format!("-{code}\r\n").as_bytes());
        let Ok(Value::ServerError(refusal)) = reply else {
            panic!("{reply:?}")
        };
        let error = error::refused(&refusal, &super::super::acl::AclLine::new("x", 0));
        let mut examined = examined();
        examined.judge_write(&refusal, error, true);
        assert_eq!(codes(&examined), expected, "{code}");
    }
}
